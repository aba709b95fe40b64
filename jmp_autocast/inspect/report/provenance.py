"""Which rows the reason of a row points at: following the first of them ends in a cause.

A reason names an operand, or a reader, and two rows may name each other: the maximum in a softmax
is float32 since what moves it to an ``exp`` is float32, and that is float32 since the maximum is.
Only one of the two came first. Planning goes forward, and what is promoted follows its operands;
then it goes back, and what is asked follows its readers; then forward again. Rows are explained
here in that order, each by a row that was explained before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interpreters import ReasonCode
from ...interpreters.after.walk import Origin, Visit
from ...interpreters.compat import JaxprEqn, Literal, source_line
from ...interpreters.plan.needs import ROWS, Need
from ...interpreters.plan.reasons import READ_BY
from ...interpreters.primitives.reading import subtracted_from_one
from ...interpreters.primitives.structure import bodies
from ...interpreters.primitives.traits import having

# These reasons are about who reads the result. All others are about what the equation reads.
_ABOUT_READERS = frozenset(
    (ReasonCode.FEEDER, ReasonCode.CLEAR_NARROW, ReasonCode.LOG_GUARD, ReasonCode.DOT_OUT)
)


def causes_of(visits: Sequence[Visit]) -> list[tuple[int, ...]]:
    """Returns, for each visit of a plan, the visits behind the reason of its dtypes.

    Following the first of them ends in a visit that has none, or goes round the carry of a loop.

    Args:
        visits: What `walk_plan` returns.
    """
    readers, around = _readers(visits), _around(visits)
    causes = [_named(visit, visits, readers, around) for visit in visits]
    asked = [_is_asked(visit) for visit in visits]
    explained = [not found for found in causes]
    ends = False
    # Each round takes linear time, and there are as many as planning had sweeps: programs have tens
    # of thousands of equations.
    while not all(explained):
        before = sum(explained)
        for i, found in enumerate(causes):
            waits = not explained[i] and visits[i].plan.reason.code not in _ABOUT_READERS
            if waits and (known := [k for k in found if explained[k]]):
                causes[i], explained[i] = tuple(dict.fromkeys([known[0], *found])), True
        # The first explained row that a value reaches through rows that are not explained yet.
        reached: list[int | None] = [None] * len(visits)
        for i in reversed(range(len(visits))):
            known = [k for r in readers[i] if (k := reached[r]) is not None]
            if not explained[i] and asked[i] and (known or ends):
                first = [k for k in causes[i] if k in known]
                causes[i], explained[i] = (*first, *known)[:1], True
            reached[i] = i if explained[i] else next(iter(known), None)
        stuck = sum(explained) == before
        if stuck and ends:
            # What is left goes round the carry of a loop.
            waiting = [i for i, done in enumerate(explained) if not done]
            explained[next((i for i in waiting if _carried(visits[i].eqn)), waiting[-1])] = True
        # What nobody reads for a reason of its own is returned, maybe behind what moves it.
        ends = stuck and not ends
    return causes


_MOVES = having("moves")
NEEDS = {READ_BY + row.reader: row for row in ROWS if row.reader}


def readers_in_words(visits: Sequence[Visit]) -> dict[int, str]:
    """Returns which equation has the need behind a reason, with its line, for each that has one.

    It is the first that the value reaches through what passes the need on.

    Args:
        visits: What `walk_plan` returns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> def router(w, x):
        ...     return jax.lax.top_k(jax.nn.sigmoid(x @ w), 2)
        >>> rows = explain(router, jnp.ones((8, 8)), jnp.ones((8, 8)), policy=BF16).rows
        >>> row = next(row for row in rows if row.primitive == "logistic")
        >>> row.cause.partition(", ")[0]
        'read by what ranks it: top_k'
    """
    needed = {v.index: row for v in visits if (row := NEEDS.get(v.plan.reason.cause))}
    if not needed:
        return {}
    users: list[list[int]] = [[] for _ in visits]
    for visit in visits:
        for made in (*visit.origins, *(m for several in visit.returned for m in several)):
            if isinstance(made, int):
                users[made].append(visit.index)
    found, around = {}, _around(visits)
    for start, row in needed.items():
        seen, waiting = {start}, list(users[start])
        while waiting:
            eqn = visits[at := waiting.pop(0)].eqn
            name = eqn.primitive.name
            # What is scaled or shifted by a number only passes it on.
            scales = name in row.through and any(isinstance(v, Literal) for v in eqn.invars)
            subtracts = row.need & Need.SHARP and subtracted_from_one(eqn) is not None
            if at > start and name in row.primitives and (subtracts or not scales):
                # What JAX's own functions hold may have no line: that of the call does.
                places = (visits[k].eqn for k in (at, *reversed(around[at])))
                line = next((line for place in places if (line := source_line(place))), "")
                found[start] = f"{name}, {line}"
                break
            if at not in seen and (name in row.through | _MOVES or visits[at].plan.inner):
                seen.add(at)
                waiting += users[at]
    return found


def _is_asked(visit: Visit) -> bool:
    """Whether the readers of a value decide: also where a call casts what its body reads."""
    code = visit.plan.reason.code
    casts = visit.plan.inner and any(dtype is not None for dtype in visit.plan.operands)
    return code in _ABOUT_READERS or (code is ReasonCode.STRUCTURAL and bool(casts))


def _readers(visits: Sequence[Visit]) -> list[list[int]]:
    """Returns who reads what each visit makes, in its dtype, in the order of the program."""
    readers: list[set[int]] = [set() for _ in visits]
    for visit in visits:
        carried = _carried(visit.eqn)
        for i, (made, dtype) in enumerate(zip(visit.origins, visit.plan.reads, strict=True)):
            # A call does not read what it hands in: what is inside does.
            reads = not visit.inner or i in carried
            if isinstance(made, int) and reads and dtype in _dtypes(visits[made]):
                readers[made].add(visit.index)
    for visit in visits:
        # What a branch or a loop returns is read by the readers of its results.
        for origins in visit.returned:
            for made in origins:
                if isinstance(made, int) and made > visit.index:
                    readers[made].update(r for r in readers[visit.index] if r > made)
    return list(map(sorted, readers))


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
    readers: Sequence[Sequence[int]],
    around: Sequence[Sequence[int]],
) -> tuple[int, ...]:
    """Returns the rows that a reason names."""
    reason = visit.plan.reason
    if reason.code in _ABOUT_READERS:
        name = reason.cause.removeprefix(READ_BY)
        if name in (reason.cause, "the output"):
            return ()
        # It may name a call, of which a reader is inside. A body that is called twice has one plan,
        # whose reason names the reader of the first call.
        own = {r: [k for k in (r, *around[r]) if k > visit.index] for r in readers[visit.index]}
        names = {r: {visits[k].eqn.primitive.name for k in found} for r, found in own.items()}
        return tuple([r for r in own if name in names[r]] or own)
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


def _carried(eqn: JaxprEqn) -> dict[int, int]:
    """Returns from the operand that a loop's carry starts as to the result that it ends as."""
    return {
        body.operands[i]: result
        for body in bodies(eqn)
        for i, output in body.carries
        if (result := body.results[output]) is not None
    }
