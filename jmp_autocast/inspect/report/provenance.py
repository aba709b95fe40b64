"""The rows that caused the dtypes of a row; following the first of them ends in a cause.

A reason names an operand or a consumer, and two rows may name each other: the maximum in a softmax
is float32 for its broadcast to an ``exp``, and the broadcast is float32 for the maximum. Only one
of the two came first. Planning goes forward, and promoted rows follow their operands; then it goes
back, and requested rows follow their consumers; then forward again. Rows are explained here in that
order, each by a row that was explained before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ...interpreters import ReasonCode
from ...interpreters.after.walk import Origin, Visit
from ...interpreters.compat import JaxprEqn
from ...interpreters.plan.reasons import READ_BY
from ...interpreters.primitives.structure import bodies

# These reasons are about consumers of the result. All others are about operands.
_ABOUT_CONSUMERS = frozenset(
    (ReasonCode.FEEDER, ReasonCode.CLEAR_NARROW, ReasonCode.LOG_GUARD, ReasonCode.DOT_OUT)
)


def causes_of(visits: Sequence[Visit]) -> list[tuple[int, ...]]:
    """Returns, for each visit of a plan, the visits behind the reason of its dtypes.

    Following the first of them ends in a visit that has none, or goes round the carry of a loop.
    """
    consumers, around = _consumers(visits), _around(visits)
    causes = [_named(visit, visits, consumers, around) for visit in visits]
    requested = [_is_requested(visit) for visit in visits]
    explained = [not found for found in causes]
    ends = False
    # As many rounds as planning had sweeps, of linear time: programs have tens of thousands of
    # equations.
    while not all(explained):
        before = sum(explained)
        for i, found in enumerate(causes):
            waits = not explained[i] and visits[i].plan.reason.code not in _ABOUT_CONSUMERS
            if waits and (known := [k for k in found if explained[k]]):
                causes[i], explained[i] = tuple(dict.fromkeys([known[0], *found])), True
        # The first explained row that a value reaches through rows that are not explained yet.
        reached: list[int | None] = [None] * len(visits)
        for i in reversed(range(len(visits))):
            known = [k for r in consumers[i] if (k := reached[r]) is not None]
            if not explained[i] and requested[i] and (known or ends):
                first = [k for k in causes[i] if k in known]
                causes[i], explained[i] = (*first, *known)[:1], True
            reached[i] = i if explained[i] else next(iter(known), None)
        stuck = sum(explained) == before
        if stuck and ends:
            # The others go round the carry of a loop.
            waiting = [i for i, done in enumerate(explained) if not done]
            explained[next((i for i in waiting if _carried(visits[i].eqn)), waiting[-1])] = True
        # A value without an explained consumer is an output, maybe moved.
        ends = stuck and not ends
    return causes


def _is_requested(visit: Visit) -> bool:
    """Whether consumers decide: also if a call casts the operands of its body."""
    code = visit.plan.reason.code
    casts = visit.plan.inner and any(dtype is not None for dtype in visit.plan.operands)
    return code in _ABOUT_CONSUMERS or (code is ReasonCode.STRUCTURAL and bool(casts))


def _consumers(visits: Sequence[Visit]) -> list[list[int]]:
    """Returns the consumers of each visit's results in their dtype, in program order."""
    found: list[set[int]] = [set() for _ in visits]
    for visit in visits:
        carried = _carried(visit.eqn)
        for i, (origin, dtype) in enumerate(zip(visit.origins, visit.plan.reads, strict=True)):
            # The consumers of a call's operands are inside, except for carries.
            consumes = not visit.inner or i in carried
            if isinstance(origin, int) and consumes and dtype in _dtypes(visits[origin]):
                found[origin].add(visit.index)
    for visit in visits:
        # The consumers of the results of a branch or a loop are those of the equation.
        for origin in itertools.chain(*visit.returned):
            if isinstance(origin, int) and origin > visit.index:
                found[origin].update(r for r in found[visit.index] if r > origin)
    return list(map(sorted, found))


def _dtypes(visit: Visit) -> set[Any]:
    handed_in = visit.plan.operands if visit.plan.inner else ()
    return {state.dtype for state in visit.plan.results}.union(handed_in)


def _around(visits: Sequence[Visit]) -> list[tuple[int, ...]]:
    """Returns the calls and loops around each visit."""
    found: list[tuple[int, ...]] = []
    entered: list[int] = []
    for visit in visits:
        del entered[visit.depth :]
        found.append(tuple(entered))
        entered.append(visit.index)
    return found


def _named(
    visit: Visit,
    visits: Sequence[Visit],
    consumers: Sequence[Sequence[int]],
    around: Sequence[Sequence[int]],
) -> tuple[int, ...]:
    """Returns the rows that a reason names."""
    reason = visit.plan.reason
    if reason.code in _ABOUT_CONSUMERS:
        name = reason.cause.removeprefix(READ_BY)
        if name in (reason.cause, "the output"):
            return ()
        # It may name a call with the consumer inside. A body that is called twice has one plan,
        # whose reason names the consumer of the first call.
        own = {r: [k for k in (r, *around[r]) if k > visit.index] for r in consumers[visit.index]}
        names = {r: {visits[k].eqn.primitive.name for k in found} for r, found in own.items()}
        return tuple([r for r in own if name in names[r]] or own)
    origins: list[Origin] = [visit.origins[i] for i in reason.operands]
    if reason.code in (ReasonCode.CARRY, ReasonCode.CARRY_ACCUMULATOR):
        # A carry has two producers: it starts as an operand, and is an output of the body.
        carried = _carried(visit.eqn)
        for i in reason.operands:
            origins += visit.returned[carried[i]]
    elif reason.code is ReasonCode.BRANCH_JOIN:
        casts = zip(*(branch.output_dtypes for branch in visit.plan.inner), strict=True)
        for several, dtypes in zip(visit.returned, casts, strict=True):
            origins += several if any(dtypes) else ()
    elif reason.code is ReasonCode.STRUCTURAL:
        carried = _carried(visit.eqn)
        for k, several in enumerate(visit.returned):
            origins += several if not carried or k in carried.values() else ()
        if not visit.plan.inner:
            origins += visit.origins
    rows = [origin for origin in origins if isinstance(origin, int) and origin != visit.index]
    return tuple(dict.fromkeys(rows))


def _carried(eqn: JaxprEqn) -> dict[int, int]:
    """Returns the result of each carry of a loop, by its operand."""
    return {
        body.operands[i]: result
        for body in bodies(eqn)
        for i, output in body.carries
        if (result := body.results[output]) is not None
    }
