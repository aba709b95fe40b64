"""Which rows the reason of a row points at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interpreters import ReasonCode
from ...interpreters.after.walk import Origin, Visit
from ...interpreters.primitives.structure import bodies

# These reasons are about who reads the result. All others are about what the equation reads.
_ABOUT_READERS = frozenset(
    (ReasonCode.FEEDER, ReasonCode.CLEAR_NARROW, ReasonCode.LOG_GUARD, ReasonCode.DOT_OUT)
)


def causes_of(visits: Sequence[Visit]) -> list[tuple[int, ...]]:
    """Returns, for each visit of a plan, the visits behind the reason of its dtypes.

    It takes linear time: programs have tens of thousands of equations.

    Args:
        visits: What `walk_plan` returns.
    """
    readers: list[list[int]] = [[] for _ in visits]
    for visit in visits:
        # Once per reader, which may read a value twice, as x * x does.
        for made in set(visit.origins):
            if isinstance(made, int):
                readers[made].append(visit.index)
    return [_causes(visit, visits, readers[visit.index]) for visit in visits]


def _causes(visit: Visit, visits: Sequence[Visit], readers: list[int]) -> tuple[int, ...]:
    reason = visit.plan.reason
    if reason.code in _ABOUT_READERS:
        return _reader(reason.cause.removeprefix("read by "), visits, readers)
    origins: list[Origin] = [visit.origins[i] for i in reason.operands]
    if reason.code in (ReasonCode.CARRY, ReasonCode.CARRY_ACCUMULATOR):
        # A carry has two makers: it starts as an operand, and is returned by the body.
        carried = _carried(visit.eqn)
        for i in reason.operands:
            origins += visit.returned[carried[i]]
    elif reason.code is ReasonCode.BRANCH_JOIN:
        casts = zip(*(branch.output_dtypes for branch in visit.plan.inner), strict=True)
        for made, dtypes in zip(visit.returned, casts, strict=True):
            origins += made if any(dtypes) else ()
    elif reason.code is ReasonCode.STRUCTURAL:
        carried = _carried(visit.eqn)
        for k, made in enumerate(visit.returned):
            origins += made if not carried or k in carried.values() else ()
        if not visit.plan.inner:
            origins += visit.origins
    rows = [origin for origin in origins if isinstance(origin, int) and origin != visit.index]
    return tuple(dict.fromkeys(rows))


def _carried(eqn: Any) -> dict[int, int]:
    """Returns from the operand that a loop's carry starts as to the result that it ends as."""
    return {
        body.operands[i]: result
        for body in bodies(eqn)
        for i, output in body.carries
        if (result := body.results[output]) is not None
    }


def _reader(name: str, visits: Sequence[Visit], readers: list[int]) -> tuple[int, ...]:
    """Returns the first reader of that name, or the one in the call or loop of that name.

    A body that is called twice has one plan, whose reason names the reader of the first call. Where
    no reader has the name, the first reader stands for it.
    """
    if name == "the output" or not readers:
        return ()
    reader = next((r for r in readers if visits[r].eqn.primitive.name == name), readers[0])
    inside = range(reader + 1, reader + 1 + visits[reader].inner)
    within = (r for r in readers if r in inside and not visits[r].inner)
    return (next(within, reader),)
