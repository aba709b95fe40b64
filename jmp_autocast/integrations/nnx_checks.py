"""Checks of the changes of a call in NNX objects: of tracers left, and of outer traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from ..interpreters.compat import Tracer
from .flax_compat import Path, assign, is_hijax, objects_in, static_values, write_again


def is_object(x: Any) -> bool:
    """True for NNX objects: modules, variables, `Rngs`, optimizers, metrics."""
    return isinstance(x, nnx.Pytree | nnx.Variable) and not is_hijax(x)


def check_no_hijax(name: str, leaves: Iterable[tuple[Path, Any]]) -> None:
    """Raises TypeError for a hijax variable in an NNX object that is split.

    The merged object would hold a copy of it: the writes of the function would be lost, and Flax
    0.12.12 does not allow to write the original in a trace.

    Args:
        name: The function's name.
        leaves: The variables of the objects, with their paths.
    """
    for path, leaf in leaves:
        if is_hijax(leaf):
            raise TypeError(
                f"{name} gets an NNX object with the hijax variable {'/'.join(map(str, path[2:]))}"
                ", which is a value of JAX itself. Use jmp_autocast.autocast, which takes such "
                "objects unchanged, or nnx.with_vars(model, hijax=False)."
            )


def check_writable(roots: Any, paths: Iterable[Path] | None = None) -> None:
    """Raises Flax's error for an object of an outer trace, before anything is written.

    Flax itself checks one object after the other while it writes them, and a module only if an
    attribute is assigned.

    Args:
        roots: The NNX objects, in lists and tuples.
        paths: The paths of the values to be written; None for all.

    Raises:
        flax.errors.TraceContextError: An object that is to be written is of an outer trace.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> model = nnx.Dropout(0.5)
        >>> check_writable([model])
        >>> jax.make_jaxpr(lambda x: check_writable([model]))(1.0)
        Traceback (most recent call last):
            ...
        flax.errors.TraceContextError: Cannot mutate 'Dropout' from different trace level ...
    """
    objects = {path: x for path, x in objects_in(roots) if is_object(x)}
    if paths is not None:
        owners = (_owner(objects, path) for path in paths)
        objects = {path: objects[path] for path in owners}
    for x in objects.values():
        if isinstance(x, nnx.Variable):
            write_again(x)
        elif attributes := vars(x):
            name = next(iter(attributes))
            assign(x, name, attributes[name])


def _owner(objects: dict[Path, Any], path: Path) -> Path:
    """Returns the path of the innermost object that a path leads through."""
    return next(path[:k] for k in range(len(path), -1, -1) if path[:k] in objects)


def static_tracers(graphdef: Any) -> dict[int, Any]:
    """Returns the traced arrays in a graph's static attributes, with the attribute's name, by id.

    Example:
        >>> from flax import nnx
        >>> static_tracers(nnx.graphdef(nnx.Dropout(0.5)))
        {}
    """
    return {
        id(x): name
        for name, value in static_values(graphdef)
        for x in jax.tree_util.tree_leaves(value)
        if isinstance(x, Tracer)
    }


def arrays_as_data(roots: Sequence[Any], known: dict[int, Any]) -> None:
    """Turns traced arrays that a call assigned to attributes into data, as Flax does with arrays.

    In Flax 0.12 a new attribute is static if it is a traced array: it would stay in the caller's
    object after the trace.

    Args:
        roots: The NNX objects.
        known: The ids of traced arrays of an outer trace.
    """
    for _, node in objects_in(roots):
        # A copy: an assignment changes the dictionary that is read here.
        attributes = dict(vars(node)) if isinstance(node, nnx.Pytree) else {}
        for name, value in attributes.items():
            if isinstance(value, jax.Array) and not nnx.is_data(value) and id(value) not in known:
                assign(node, name, nnx.data(value))
