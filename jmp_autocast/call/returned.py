"""Checks that objects in the result of a traced function hold no tracers."""

from __future__ import annotations

import types
from typing import Any

import jax

from ..interpreters.compat import Tracer

_DEPTH = 4
"""The depth to which nested objects are searched: a list in an attribute is at depth 2."""


def check_returned(leaf: Any, name: str) -> None:
    """Raises TypeError if a leaf of a result is an object that holds a tracer.

    `autocast` returns strings, numbers and functions unchanged, while `jax.jit` refuses them. But a
    tracer inside a returned object would never be replaced by its value.

    Args:
        leaf: A leaf of the function's result.
        name: The function's name.
    """
    if _holds_tracer(leaf, _DEPTH, set()):
        raise TypeError(
            f"autocast({name}) traced a function that returns a {type(leaf).__qualname__}, which "
            "holds arrays and is not a valid JAX type. Return arrays in a pytree: a dict, a tuple, "
            "a NamedTuple or a class registered with jax.tree_util.register_dataclass. Build "
            "modules outside autocast."
        )


def _holds_tracer(value: Any, depth: int, seen: set[int]) -> bool:
    if isinstance(value, Tracer):
        return True
    if depth == 0 or id(value) in seen or isinstance(value, type | types.ModuleType):
        return False
    seen.add(id(value))
    leaves = jax.tree.leaves(getattr(value, "__dict__", None))
    return any(_holds_tracer(leaf, depth - 1, seen) for leaf in leaves)
