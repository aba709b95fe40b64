"""Which values reach an equation in which their rounding does harm, through cheap operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..compat import body_of, variables_in
from ..primitives.complements import subtracted_from_one
from ..primitives.reading import casts_to_integer, exponent
from ..primitives.structure import STRUCTURES, bodies
from ..primitives.traits import having

Memo: TypeAlias = dict[tuple[Any, ...], frozenset[Any]]

_CHEAP = having("feeds") | having("rounds")
_POLE_AT_0, _POLE_AT_1 = having("log0"), having("div1")
_SNAPS = having("snaps")


class Harm(NamedTuple):
    """Where a rounding does harm.

    Args:
        primitives: The primitives whose equations are looked at: few of a program's.
        operands: Returns the operands of such an equation that are harmed.
    """

    primitives: frozenset[str]
    operands: Callable[[Any], Sequence[Any]]


def _steep(eqn: Any) -> Sequence[Any]:
    # Near its pole the function multiplies an error of its operand by 1 / operand: 2**-9 of a
    # probability of 2**-9 is no longer small.
    name, first = eqn.primitive.name, eqn.invars[:1]
    if name in _POLE_AT_0 or (exponent(eqn) or 0) < 0:
        return first
    is_complement = subtracted_from_one(eqn) is not None
    return eqn.invars[1:] if name in _POLE_AT_1 or is_complement else ()


def _snapping(eqn: Any) -> Sequence[Any]:
    return eqn.invars if eqn.primitive.name in _SNAPS or casts_to_integer(eqn) else ()


STEEP = Harm(_POLE_AT_0 | _POLE_AT_1 | {"integer_pow", "sub"}, _steep)
"""A saturated operand makes the result infinite, or loses it: in bfloat16 a sigmoid of 12 is 1,
log(1 - 1) is infinite, and a gate of 1 - 1 never opens."""

SNAPPING = Harm(_SNAPS | {"convert_element_type", "bitcast_convert_type"}, _snapping)
"""The operand becomes an integer (an index, a bin, a quantized value): position 999 is 1,000 in
bfloat16, and of 1,000 indices of a grid plus an offset 56 % were wrong."""


def reaching(harm: Harm, jaxpr: Any, outputs: frozenset[int], memo: Memo) -> frozenset[Any]:
    """Returns the variables that reach certain operands through cheap operations and calls.

    Args:
        harm: Says which operands: `STEEP` or `SNAPPING`.
        jaxpr: An open jaxpr.
        outputs: Which of its outputs reach one outside.
        memo: What is known already: a layer may be called many times, and is asked again in each
            sweep. Who owns it keeps the jaxprs alive.
    """
    if (key := (harm, id(jaxpr), outputs)) in memo:
        return memo[key]
    # From the last equation to the first, so that each variable is complete when it is looked at.
    reached_by = set(variables_in([jaxpr.outvars[k] for k in outputs]))
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        found = list(harm.operands(eqn)) if name in harm.primitives else []
        if name in _CHEAP and reached_by and not reached_by.isdisjoint(eqn.outvars):
            found += eqn.invars
        # What a loop carries round is followed once: whatever saturates in the next iteration
        # stands in the same equation.
        for body in bodies(eqn) if name in STRUCTURES else ():
            inner = body_of(body.jaxpr)
            reached = frozenset(
                k
                for k, r in enumerate(body.results)
                if r is not None and eqn.outvars[r] in reached_by
            )
            within = reaching(harm, inner, reached, memo)
            pairs = zip(body.operands, inner.invars, strict=True)
            found += [eqn.invars[i] for i, v in pairs if v in within]
        if found:
            reached_by.update(variables_in(found))
    memo[key] = frozenset(reached_by)
    return memo[key]
