"""``1 - f(x)`` becomes the function that it is: 16 bits round ``f(x)`` to 1.

In bfloat16 a sigmoid of 7 is 1, and ``1 - sigmoid(7)`` is 0 instead of 0.0009: a gate that never
opens. ``sigmoid(-7)`` is 0.0009 in 16 bits as well, and in float32 it has digits where the
difference has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax

from ...policies import Policy
from ..compat import body_of
from ..compat.rebuilding import equation_like, variable, with_equations
from ..primitives.reading import subtracted_from_one
from .place import RegionOf, is_lowered, is_ruled

COMPLEMENTS: Mapping[str, tuple[Callable[[Any], Any], ...]] = MappingProxyType(
    {"logistic": (lax.neg, lax.logistic), "erf": (lax.erfc,), "erfc": (lax.erf,)}
)
"""From a primitive to functions of its operand, one after the other, for 1 less its result."""


def complements(jaxpr: Any, policy: Policy, region_of: RegionOf) -> Any:
    """Returns a jaxpr without differences of 1 and a function that has a complement.

    They stay where a rule of the user's, or a scope, decides on one of the functions, at level
    "tensor_cores", and where the program itself declares 16 bits.

    Args:
        jaxpr: An open or closed jaxpr.
        policy: The policy of the program.
        region_of: Returns the region of an equation.
    """
    if policy.level == "tensor_cores":  # nothing but products is rounded, and loses digits
        return jaxpr
    makers: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn in body_of(jaxpr).eqns:
        if eqn.primitive.name in COMPLEMENTS and eqn.invars[0].aval.dtype == policy.wide_dtype:
            makers[eqn.outvars[0]] = eqn
        maker = makers.get(subtracted_from_one(eqn)) if makers else None
        if maker is None or not _may_change(eqn, maker, policy, region_of):
            eqns.append(eqn)
        else:
            eqns += _complement(eqn, maker)
    return with_equations(jaxpr, eqns)


def _may_change(eqn: Any, maker: Any, policy: Policy, region_of: RegionOf) -> bool:
    primitives = [primitive.name for primitive, _ in _primitives_of(maker)]
    names = {eqn.primitive.name, maker.primitive.name, *primitives}
    regions = region_of(eqn), region_of(maker)
    return all(is_lowered(r) and not is_ruled(policy, r, names) for r in regions)


def _complement(eqn: Any, maker: Any) -> list[Any]:
    """Returns the equations in place of a difference, from the operand of what made its operand."""
    *first, (last, params) = _primitives_of(maker)
    (made,), eqns = maker.invars, []
    for primitive, options in first:
        result = variable(maker.outvars[0].aval)
        eqns.append(equation_like(eqn, primitive, [made], result, options))
        made = result
    return [*eqns, equation_like(eqn, last, [made], eqn.outvars[0], params)]


def _primitives_of(maker: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Returns the primitives of a complement, and their parameters."""
    dtype = maker.invars[0].aval.dtype
    return [_primitive_of(function, dtype) for function in COMPLEMENTS[maker.primitive.name]]


@functools.lru_cache(maxsize=16)
def _primitive_of(function: Callable[[Any], Any], dtype: np.dtype) -> tuple[Any, dict[str, Any]]:
    (eqn,) = body_of(jax.make_jaxpr(function)(np.zeros((), dtype))).eqns
    return eqn.primitive, eqn.params
