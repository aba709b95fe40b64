"""Which custom functions have one derivative rule: JAX wraps the rule anew at each call.

A ResNet calls ``jax.nn.relu`` 49 times, and its jaxpr has 49 rules. Behind all of them is one
function of JAX's library. What is not known here counts as itself alone, so that a new JAX makes
rules differ, and never makes them the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import CellType, CodeType, FunctionType
from typing import Any

import jax
import jax.core
import numpy as np
from jax._src.linear_util import DebugInfo, EqualStore, Store
from jax.extend.linear_util import WrappedFun

_JAX = jax.__file__.removesuffix("__init__.py")

_AVAL: Any = jax.core.ShapedArray

# Equal ones are the same to a rule.
_DATA = type(None), str, bytes, type, CodeType, np.dtype, _AVAL, jax.tree_util.PyTreeDef

# Of one call, and no part of what it computes: names for messages, where it was, and what became of
# its results.
_OF_THE_CALL = (DebugInfo, Store, EqualStore, jax.core.Trace)

# The variables of the wrapper in which JAX remembers what a rule has returned.
_OF_A_MEMO = frozenset(("cells", "sentinel"))


class _Itself:
    """An object as a key: equal to itself alone, and alive as long as the key."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def rule_key(rule: Any, own: list[Any] | None = None) -> Hashable:
    """Returns what wrappers of one function have in common, as a key.

    Args:
        rule: A parameter of an equation.
        own: Gets the objects that are not known here, as functions of the user's own are.
    """
    kind = type(rule)
    if isinstance(rule, _DATA):
        return kind, rule
    if kind in (bool, int, float, complex):
        # To Python 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        return kind, repr(rule)
    if isinstance(rule, _OF_THE_CALL):
        return kind
    if isinstance(rule, WrappedFun):
        parts = rule.f, rule.transforms, rule.params
        return kind, *[rule_key(part, own) for part in parts]
    if kind is tuple or (rule and kind is list and all(isinstance(x, _AVAL) for x in rule)):
        return kind, *[rule_key(part, own) for part in rule]
    if isinstance(rule, FunctionType) and rule.__code__.co_filename.startswith(_JAX):
        # A function of the user's own is itself: what it closes over may change between its calls.
        named = zip(rule.__code__.co_freevars, rule.__closure__ or (), strict=True)
        cells = [_content(cell) for name, cell in named if name not in _OF_A_MEMO]
        parts = *cells, rule.__defaults__, rule.__kwdefaults__
        return rule.__code__, *[rule_key(part, own) for part in parts]
    if own is not None:
        own.append(rule)
    return _Itself(rule)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return cell
