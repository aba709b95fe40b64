"""What a call may leave in NNX objects: nothing of its own trace, nothing in an outer trace's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from ..interpreters.compat import Tracer

Path = tuple[Any, ...]


def is_object(x: Any) -> bool:
    """True for NNX objects: modules, variables, `Rngs`, optimizers, metrics."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def check_writable(roots: Any, paths: Iterable[Path] | None = None) -> None:
    """Raises Flax's error where an object belongs to an outer trace, before anything is written.

    Flax itself checks one object after the other while it writes them, and a module only if an
    attribute is assigned.

    Args:
        roots: The NNX objects, in lists and tuples.
        paths: Where in the roots something is to be written; None for everywhere.

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
    objects = {path: x for path, x in nnx.iter_graph(roots, graph=True) if is_object(x)}
    if paths is not None:
        owners = (_owner(objects, path) for path in paths)
        objects = {path: objects[path] for path in owners}
    for x in objects.values():
        if isinstance(x, nnx.Variable):
            x.set_raw_value(x.get_raw_value())
        elif attributes := vars(x):
            name = next(iter(attributes))
            nnx.Pytree.__setattr__(x, name, attributes[name])


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
        for name, attribute in graphdef.attributes
        for x in jax.tree_util.tree_leaves(getattr(attribute, "value", None))
        if isinstance(x, Tracer)
    }


def same_structure(one: Any, other: Any) -> bool:
    """Returns whether two graphs have equal nodes and attributes.

    The dataclasses of a graph compare static values with `==` from Python 3.13 on, which has no
    truth value for arrays; the tuples made here take an object for equal to itself, as Python 3.12
    did.

    Example:
        >>> from flax import nnx
        >>> same_structure(nnx.graphdef(nnx.Dropout(0.5)), nnx.graphdef(nnx.Dropout(0.1)))
        False
    """
    return _comparable(one) == _comparable(other)


def _comparable(graphdef: Any) -> tuple[Any, ...]:
    attributes = [
        (name, type(attribute), getattr(attribute, "value", None))
        for name, attribute in graphdef.attributes
    ]
    return graphdef.nodes, attributes, graphdef.num_leaves


def arrays_as_data(roots: Sequence[Any], known: dict[int, Any]) -> None:
    """Makes data of the arrays that a call assigned to attributes, as they are without a trace.

    Flax takes a new attribute for data if it is an array, but for static if it is a traced one
    (0.12): it would stay in the caller's object after the trace.

    Args:
        roots: The NNX objects.
        known: The ids of traced arrays that were there before: those of an outer trace.
    """
    for _, node in nnx.iter_graph(roots, graph=True):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if (
                    isinstance(value, jax.Array)
                    and not nnx.is_data(value)
                    and id(value) not in known
                ):
                    nnx.Pytree.__setattr__(node, name, nnx.data(value))
