"""Which values reach a logarithm or a denominator, where a flattened value does harm."""

from __future__ import annotations

from typing import Any

from ..compat import Literal, body_of
from ..primitives.structure import bodies
from ..primitives.traits import having

_CHEAP = having("feeds") | having("rounds")
_POLE_AT_0, _POLE_AT_1 = having("log0"), having("div1")


def reaching_logarithm(
    jaxpr: Any, outputs: frozenset[int], memo: dict[Any, frozenset[Any]]
) -> frozenset[Any]:
    """Returns the variables that reach a logarithm or a denominator through cheap operations.

    What saturates there needs float32: in bfloat16 a sigmoid of 12 is 1, and log(1 - 1) infinite.

    Args:
        jaxpr: An open jaxpr.
        outputs: Which of its outputs reach one outside.
        memo: What is known already, as a layer may be called many times: empty at first.
    """
    if (id(jaxpr), outputs) in memo:
        return memo[id(jaxpr), outputs]
    # From the last equation to the first, so that each variable is complete when it is looked at.
    reaching = {v for k in outputs if not isinstance(v := jaxpr.outvars[k], Literal)}
    for eqn in reversed(jaxpr.eqns):
        name, found = eqn.primitive.name, []
        # Near its pole the function multiplies an error of its operand by 1 / operand: 2**-9 of a
        # probability of 2**-9 is no longer small.
        if name in _POLE_AT_0:
            found += eqn.invars[:1]
        if name in _POLE_AT_1:
            found += eqn.invars[1:]
        if name in _CHEAP and not reaching.isdisjoint(eqn.outvars):
            found += eqn.invars
        # What a loop carries round is followed once: whatever saturates in the next iteration
        # stands in the same equation.
        for body in bodies(eqn):
            inner = body_of(body.jaxpr)
            reached = frozenset(
                k
                for k, r in enumerate(body.results)
                if r is not None and eqn.outvars[r] in reaching
            )
            within = reaching_logarithm(inner, frozenset(reached), memo)
            pairs = zip(body.operands, inner.invars, strict=True)
            found += [eqn.invars[i] for i, v in pairs if v in within]
        reaching.update(v for v in found if not isinstance(v, Literal))
    memo[id(jaxpr), outputs] = frozenset(reaching)
    return memo[id(jaxpr), outputs]
