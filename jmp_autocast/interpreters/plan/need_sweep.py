"""The sweep of needs over a jaxpr, from the last equation to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ...policies import CastPolicy, Policy
from ...policies.registry import registered_rules
from ..compat import Atom, Jaxpr, JaxprEqn, Literal, body_of
from ..primitives.structure import STRUCTURES, Body, bodies
from .consumers import reads
from .mark_sweep import Memo, inputs_of, marks_of
from .marks import Marks
from .needs import NOTHING, REQUESTED, STOPS, THROUGH, Need, NeedContext

Needs: TypeAlias = Mapping[Any, Need]


def needs_of(
    jaxpr: Jaxpr,
    outputs: Sequence[Need],
    memo: Memo,
    inputs: Sequence[Any],
    path: tuple[str, ...] = (),
) -> Needs:
    """Returns the needs of each variable of a jaxpr.

    Args:
        jaxpr: An open jaxpr.
        outputs: The needs of its outputs.
        memo: A cache, whose owner keeps the jaxprs alive.
        inputs: The marks of its inputs.
        path: The scopes around it.
    """
    facts = marks_of(jaxpr, inputs, memo)
    key = "needs", id(facts), tuple(outputs), path
    if (known := memo.get(key)) is not None:
        return known
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    promoted, needs = memo.get("promoted", ()), {}

    def add(atoms: Sequence[Atom], need: Need) -> None:
        for v in atoms:
            if not isinstance(v, Literal):
                known = needs.get(v, NOTHING)
                needs[v] = known | need | (Need.SHARED if known & need & Need.ONCE else NOTHING)

    for v, need in zip(jaxpr.outvars, outputs, strict=True):
        if need:
            add([v], need)
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        name, of_results = eqn.primitive.name, NOTHING
        region = memo["regions"].at(path, eqn)
        for v in eqn.outvars:
            of_results |= needs.get(v, NOTHING)
        if name in STRUCTURES:
            of_each = [needs.get(v, NOTHING) for v in eqn.outvars]
            found = needs_in_bodies(eqn, of_each, memo, facts.operands[i], region.names)
            for k, need in reads_of(found).items():
                add([eqn.invars[k]], need)
            for body, _, within in found:
                # A result that its body also reads in float32 is shared by both sides.
                for r, v in zip(body.results, body_of(body.jaxpr).outvars, strict=True):
                    if r is not None and not isinstance(v, Literal):
                        add([eqn.outvars[r]], within.get(v, NOTHING) & Need.SHARED)
            continue
        through = THROUGH.get(name, NOTHING)
        passed = of_results & (through | Need.LEADS if name in promoted else through)
        for need, stops in STOPS:
            if passed & need and stops(eqn):
                passed ^= need
        marks = facts.operands[i]
        add(eqn.invars, passed | reads(eqn, marks, of_results, region))
        if rows := REQUESTED.get(name):
            ctx = NeedContext(eqn, marks, of_results, producers, facts.images)
            for row in rows:
                add(row.operands(ctx), row.need)
    memo[key] = needs
    return needs


def promoted_by_rules(policy: Policy) -> frozenset[str]:
    """Returns the primitives that a user's rule may promote: LEADS passes through them."""
    rules = [*registered_rules(), *((name, rule) for _, name, rule in policy.rules)]
    names = [name for name, rule in rules if rule is CastPolicy.PROMOTE or callable(rule)]
    return frozenset(names) - STRUCTURES.keys()


class ReadIn(NamedTuple):
    """The needs in a body.

    Args:
        body: The body.
        returned: The needs of its outputs, outside the body and in the next iteration.
        within: The needs of each of its variables.
    """

    body: Body
    returned: Sequence[Need]
    within: Needs


def needs_in_bodies(
    eqn: JaxprEqn,
    of_results: Sequence[Need],
    memo: Memo,
    given: Sequence[Marks],
    path: tuple[str, ...],
) -> list[ReadIn]:
    """Returns the needs in each body of a call, a branch or a loop.

    The consumers of an iteration's outputs are in the next iteration and in the condition. Without
    them a sigmoid that the next step ranks was rounded, and 19 of 20 choices were wrong.

    Args:
        eqn: The equation.
        of_results: The needs of its results.
        memo: As for `needs_of`.
        given: The marks of its operands.
        path: The scopes around its bodies.
    """
    held = bodies(eqn)
    returned = [[NOTHING if r is None else of_results[r] for r in b.results] for b in held]
    while True:
        found = [
            ReadIn(
                b,
                outputs,
                needs_of(body_of(b.jaxpr), outputs, memo, inputs_of(b, given, memo), path),
            )
            for b, outputs in zip(held, returned, strict=True)
        ]
        within, before = reads_of(found), [list(outputs) for outputs in returned]
        for body, outputs in zip(held, returned, strict=True):
            for k, need in read_by_the_next(body, within).items():
                outputs[k] |= need
        if returned == before:  # the loop ends, because needs only grow
            return found


def read_by_the_next(body: Body, reads: Mapping[int, Need]) -> Mapping[int, Need]:
    """Returns the needs of a loop body's outputs in the next iteration and in the condition."""
    return {k: reads.get(body.operands[i], NOTHING) for i, k in body.carries}


def reads_of(found: Sequence[ReadIn]) -> Mapping[int, Need]:
    """Returns the needs of an equation's operands in its bodies, by their positions."""
    reads: dict[int, Need] = {}
    for body, _, within in found:
        for i, v in zip(body.operands, body_of(body.jaxpr).invars, strict=True):
            reads[i] = reads.get(i, NOTHING) | within.get(v, NOTHING)
    return reads
