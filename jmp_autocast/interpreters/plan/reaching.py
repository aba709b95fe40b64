"""Which values reach an equation in which their rounding does harm, through cheap operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..compat import Literal, body_of
from ..primitives.reading import casts_to_integer, exponent
from ..primitives.structure import bodies
from ..primitives.traits import having

Memo: TypeAlias = dict[tuple[Any, ...], frozenset[Any]]

_CHEAP = having("feeds") | having("rounds")
_POLE_AT_0, _POLE_AT_1 = having("log0"), having("div1")
_SNAPS = having("snaps")


def steep(eqn: Any) -> Sequence[Any]:
    """Returns the operands of an equation of which a saturated value is infinite, or lost.

    In bfloat16 a sigmoid of 12 is 1, log(1 - 1) is infinite, and a gate of 1 - 1 never opens.
    """
    # Near its pole the function multiplies an error of its operand by 1 / operand: 2**-9 of a
    # probability of 2**-9 is no longer small.
    name, first = eqn.primitive.name, eqn.invars[:1]
    if name in _POLE_AT_0 or (exponent(eqn) or 0) < 0:
        return first
    is_complement = name == "sub" and isinstance(first[0], Literal) and first[0].val == 1
    return eqn.invars[1:] if name in _POLE_AT_1 or is_complement else ()


def snapping(eqn: Any) -> Sequence[Any]:
    """Returns the operands of an equation that become integers: indices, bins, quantized values.

    Position 999 is 1,000 in bfloat16: of 1,000 indices of a grid plus an offset 56 % were wrong.
    """
    return eqn.invars if eqn.primitive.name in _SNAPS or casts_to_integer(eqn) else ()


def reaching(
    harmed: Callable[[Any], Sequence[Any]],
    jaxpr: Any,
    outputs: frozenset[int],
    memo: Memo,
) -> frozenset[Any]:
    """Returns the variables that reach certain operands through cheap operations and calls.

    Args:
        harmed: Returns these operands of an equation: `steep` or `snapping`.
        jaxpr: An open jaxpr.
        outputs: Which of its outputs reach one outside.
        memo: What is known already: a layer may be called many times, and is asked again in each
            sweep. Who owns it keeps the jaxprs alive.
    """
    if (key := (harmed, id(jaxpr), outputs)) in memo:
        return memo[key]
    # From the last equation to the first, so that each variable is complete when it is looked at.
    reached_by = {v for k in outputs if not isinstance(v := jaxpr.outvars[k], Literal)}
    for eqn in reversed(jaxpr.eqns):
        found = list(harmed(eqn))
        if eqn.primitive.name in _CHEAP and not reached_by.isdisjoint(eqn.outvars):
            found += eqn.invars
        # What a loop carries round is followed once: whatever saturates in the next iteration
        # stands in the same equation.
        for body in bodies(eqn):
            inner = body_of(body.jaxpr)
            reached = frozenset(
                k
                for k, r in enumerate(body.results)
                if r is not None and eqn.outvars[r] in reached_by
            )
            within = reaching(harmed, inner, reached, memo)
            pairs = zip(body.operands, inner.invars, strict=True)
            found += [eqn.invars[i] for i, v in pairs if v in within]
        reached_by.update(v for v in found if not isinstance(v, Literal))
    memo[key] = frozenset(reached_by)
    return memo[key]
