"""Compares derivative rules of custom functions, which JAX wraps anew at each call.

A ResNet calls ``jax.nn.relu`` 49 times, and its jaxpr has 49 rule objects around one function of
JAX. An unknown object equals only itself: if a JAX release adds new wrappers, equal rules compare
as different, but different rules never as equal.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import CellType, CodeType, FunctionType
from typing import Any

import jax
import jax.core
import numpy as np

from .keyed import Keyed
from .private_names import private

_JAX = jax.__file__.removesuffix("__init__.py")

_AVAL: Any = jax.core.ShapedArray

# Objects of these classes are compared by value, not by identity.
_DATA = type(None), str, bytes, type, CodeType, np.dtype, _AVAL, jax.tree_util.PyTreeDef

# JAX's classes for names in messages, source locations, and caches of results. Each call of a rule
# has new instances of them, which do not affect the values of the rule.
_OF_THE_CALL = frozenset(("DebugInfo", "Store", "EqualStore", "DynamicJaxprTrace"))

# The closure variables in which JAX's wrapper caches the results of a rule.
_OF_A_MEMO = frozenset(("cells", "sentinel"))


def rule_key(rule: Any, own: list[Any]) -> Hashable:
    """Returns a key that is equal for all wrappers of one rule.

    Args:
        rule: A parameter of an equation, or an object inside of it.
        own: The list to which unknown objects are appended, such as functions of the user.
    """
    kind = type(rule)
    if isinstance(rule, _DATA):
        return kind, rule
    if kind in (bool, int, float, complex):
        # The key holds the type and the text, because 1, 1.0 and True are equal in Python, and so
        # are 0.0 and -0.0.
        return kind, repr(rule)
    if kind.__name__ in _OF_THE_CALL and kind.__module__.startswith("jax."):
        return kind
    if kind is tuple or (kind is list and rule and all(isinstance(x, _AVAL) for x in rule)):
        return kind, *[rule_key(part, own) for part in rule]
    if isinstance(rule, private("jax.extend.linear_util.WrappedFun") or ()):
        return kind, rule_key((rule.f, rule.transforms, rule.params), own)
    if isinstance(rule, FunctionType) and rule.__code__.co_filename.startswith(_JAX):
        # Only functions of JAX are compared by their code and closure. A user's function is equal
        # only to itself, because its closure may change between calls.
        cells = [x for name, x in cells_of(rule).items() if name not in _OF_A_MEMO]
        return rule.__code__, rule_key((*cells, rule.__defaults__, rule.__kwdefaults__), own)
    own.append(rule)
    return Keyed(id(rule), rule)


def cells_of(function: FunctionType) -> dict[str, Any]:
    """Returns the closure of a function: each cell's content by name, or the empty cell."""
    named = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: _content(cell) for name, cell in named}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return cell
