"""Checks of the NNX objects in a call: outer traces, hijax variables, tracers left behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from ..interpreters.compat import Tracer
from .flax_compat import Path, assign, is_hijax, objects_in, static_values, write_again


def is_object(x: Any) -> bool:
    """Returns whether a value is an NNX object: a module, variable, `Rngs`, optimizer or metric."""
    return isinstance(x, nnx.Pytree | nnx.Variable) and not is_hijax(x)


def check_no_hijax(name: str, leaves: Iterable[tuple[Path, Any]]) -> None:
    """Raises TypeError if an NNX object that is to be split holds a hijax variable.

    The merged object would hold a copy of the variable, so that writes by the function would be
    lost. Flax 0.12.12 does not allow a trace to write to the original.

    Args:
        name: The function's name.
        leaves: Pairs of a path and a variable of the objects.
    """
    for path, leaf in leaves:
        if is_hijax(leaf):
            raise TypeError(
                f"{name} gets an NNX object with the hijax variable {'/'.join(map(str, path[2:]))}"
                ", which is a value of JAX itself. Use jmp_autocast.autocast, which takes such "
                "objects unchanged, or nnx.with_vars(model, hijax=False)."
            )


def check_writable(roots: Any, paths: Iterable[Path] | None = None) -> None:
    """Raises Flax's error if an object to be written is of an outer trace, before any write.

    Flax checks an object only when it writes to the object. By then it may have changed other
    objects.

    Args:
        roots: A list or tuple of NNX objects, which may be nested.
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
    """Returns the path of the innermost object on a path."""
    return next(path[:k] for k in range(len(path), -1, -1) if path[:k] in objects)


def static_tracers(graphdef: Any) -> dict[int, Any]:
    """Returns a dict from the id of each tracer in a graph's static attributes to the attribute.

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
    """Turns each attribute to which a call assigned a traced array into a data attribute.

    In Flax 0.12 a new attribute with a traced array is static, unlike one with a concrete array. A
    static tracer would stay in the caller's object after the trace.

    Args:
        roots: The NNX objects.
        known: The ids of tracers that were in static attributes before the call.
    """
    for _, node in objects_in(roots):
        # Copied, because `assign` changes the dictionary during the loop.
        attributes = dict(vars(node)) if isinstance(node, nnx.Pytree) else {}
        for name, value in attributes.items():
            if isinstance(value, jax.Array) and not nnx.is_data(value) and id(value) not in known:
                assign(node, name, nnx.data(value))
