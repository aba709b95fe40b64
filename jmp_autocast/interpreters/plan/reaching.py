"""Which values reach an equation in which their rounding does harm, through cheap operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..compat import Literal, body_of, variables_in
from ..primitives.complements import subtracted_from_one
from ..primitives.reading import casts_to_integer, exponent, takes_every_other
from ..primitives.structure import STRUCTURES, Body, bodies
from ..primitives.traits import having
from .loop_carries import accumulating_carries

Memo: TypeAlias = dict[tuple[Any, ...], frozenset[Any]]

_CHEAP = having("feeds") | having("rounds")
_POLE_AT_0, _POLE_AT_1 = having("log0"), having("div1")
_SNAPS = having("snaps")
_MULTIPLIES_ALL = frozenset(("cumprod", "reduce_prod"))
# A mean of what is next to 1 is next to 1, and so is its root.
_KEEPS_NEAR_1 = _MULTIPLIES_ALL | {"reduce_sum", "cumsum", "reduce_window_sum", "sqrt"}


class Harm(NamedTuple):
    """Where a rounding does harm.

    Args:
        primitives: The primitives whose equations are looked at: few of a program's.
        operands: Returns the operands of such an equation that are harmed. It is given the
            equation, and the carries of the jaxpr that accumulate.
        through: The primitives through which a value reaches them.
    """

    primitives: frozenset[str]
    operands: Callable[[Any, frozenset[Any]], Sequence[Any]]
    through: frozenset[str] = _CHEAP


def _poles(eqn: Any, carries: frozenset[Any]) -> Sequence[Any]:
    # Near its pole the function multiplies an error of its operand by 1 / operand: 2**-9 of a
    # probability of 2**-9 is no longer small.
    name, first = eqn.primitive.name, eqn.invars[:1]
    if name in _POLE_AT_0 or (exponent(eqn) or 0) < 0:
        return first
    return eqn.invars[1:] if name in _POLE_AT_1 else ()


def _complements(eqn: Any, carries: frozenset[Any]) -> Sequence[Any]:
    return eqn.invars[1:] if subtracted_from_one(eqn) is not None else ()


def _decays(eqn: Any, carries: frozenset[Any]) -> Sequence[Any]:
    if eqn.primitive.name != "mul":
        return eqn.invars[:1]
    pairs = zip(eqn.invars, reversed(eqn.invars), strict=True)
    return [v for v, other in pairs if not isinstance(other, Literal) and other in carries]


def _snapping(eqn: Any, carries: frozenset[Any]) -> Sequence[Any]:
    return eqn.invars if eqn.primitive.name in _SNAPS or casts_to_integer(eqn) else ()


POLES = Harm(_POLE_AT_0 | _POLE_AT_1 | {"integer_pow"}, _poles)
"""A saturated operand makes the result infinite, or loses it: in bfloat16 a sigmoid of 12 is 1, and
log(1 - 1) is infinite."""

COMPLEMENTS = Harm(frozenset(("sub",)), _complements, _CHEAP | _KEEPS_NEAR_1)
"""The distance to 1 is what counts, also that of a mean of shares: a gate of 1 - 1 never opens, and
in bfloat16 a dice loss of sigmoids of 6 was 14 % off, its gradient 24 %."""

DECAYS = Harm(_MULTIPLIES_ALL | {"mul"}, _decays, _CHEAP | _KEEPS_NEAR_1)
"""The factor of many steps: a gate of 0.9975 is 1 or 0.996 in bfloat16, and a state that keeps it
for 512 steps was 2.3 times as large."""

SNAPPING = Harm(_SNAPS | {"convert_element_type", "bitcast_convert_type"}, _snapping)
"""The operand becomes an integer (an index, a bin, a quantized value): position 999 is 1,000 in
bfloat16, and of 1,000 indices of a grid plus an offset 56 % were wrong."""


def reaching(
    harm: Harm,
    jaxpr: Any,
    outputs: frozenset[int],
    memo: Memo,
    carries: frozenset[Any] = frozenset(),
) -> frozenset[Any]:
    """Returns the variables that reach certain operands through cheap operations and calls.

    Args:
        harm: Says which operands, and through what: `POLES` and the others.
        jaxpr: An open jaxpr.
        outputs: Which of its outputs reach one outside.
        memo: What is known already: a layer may be called many times, and is asked again in each
            sweep. Who owns it keeps the jaxprs alive.
        carries: Its inputs that are carries which accumulate, if it is the body of a loop.
    """
    if (key := (harm, id(jaxpr), outputs, carries)) in memo:
        return memo[key]
    # From the last equation to the first, so that each variable is complete when it is looked at.
    reached_by = set(variables_in([jaxpr.outvars[k] for k in outputs]))
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        found = list(harm.operands(eqn, carries)) if name in harm.primitives else []
        if name in harm.through and reached_by and not reached_by.isdisjoint(eqn.outvars):
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
            accumulating = accumulated_in(body, memo) if harm is DECAYS else frozenset()
            within = reaching(harm, inner, reached, memo, accumulating)
            pairs = zip(body.operands, inner.invars, strict=True)
            found += [eqn.invars[i] for i, v in pairs if v in within]
        if found:
            reached_by.update(variables_in(found))
    memo[key] = frozenset(reached_by)
    return memo[key]


def own_factors(jaxpr: Any, memo: Memo) -> frozenset[Any]:
    """Returns the variables whose elements are multiplied with those beside them.

    So does `jax.lax.associative_scan` begin that multiplies decays: like a `cumprod` of them, but
    step by step, so that no equation says how many factors there are.

    Args:
        jaxpr: An open jaxpr.
        memo: As for `reaching`.
    """
    if (key := ("own factors", id(jaxpr))) not in memo:
        origins = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if takes_every_other(e)}
        products = [e.invars for e in jaxpr.eqns if e.primitive.name == "mul"] if origins else []
        pairs = [variables_in(factors) for factors in products]
        found = ((origins.get(v), origins.get(w)) for v, w in (p for p in pairs if len(p) == 2))
        memo[key] = frozenset(v for v, w in found if v is not None and v is w)
    return memo[key]


def accumulated_in(body: Body, memo: Memo) -> frozenset[Any]:
    """Returns the inputs of a body that are carries of its loop which accumulate.

    Args:
        body: The body of a loop, or of anything else, which has no carries.
        memo: As for `reaching`.
    """
    if not body.carries:
        return frozenset()
    jaxpr = body_of(body.jaxpr)
    if (key := ("accumulated", id(jaxpr), body.fixed)) not in memo:
        found = accumulating_carries(jaxpr, body.fixed, len(body.carries))
        memo[key] = frozenset(jaxpr.invars[body.fixed + k] for k in found)
    return memo[key]
