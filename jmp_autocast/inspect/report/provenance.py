"""Which row made an operand, and which rows a reason points at: links between the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from ...interpreters.compat import Literal, scan_split
from ...interpreters.plan.data import EquationPlan, Plan, ReasonCode

Origin: TypeAlias = int | str | None
"""Where a value comes from: the row that made it, or the path of an input of the program, None for
literals and constants."""

# Their reasons point at who reads the result.
_OF_READERS = frozenset(
    (ReasonCode.FEEDER, ReasonCode.CLEAR_NARROW, ReasonCode.LOG_GUARD, ReasonCode.DOT_OUT)
)


@dataclasses.dataclass(slots=True)
class Links:
    """The links of one row.

    Args:
        primitive: The primitive's name.
        plan: The plan of the equation.
        operands: Where each operand comes from.
        causes: The rows behind the reason.
        inner: How many rows are inside; they follow it.
        returned: Where the outputs of its inside come from: a tuple for each output, with an
            origin for each branch of a ``cond``.
        first_carry: The position of the first carry of a loop among its operands.
    """

    primitive: str
    plan: EquationPlan
    operands: tuple[Origin, ...]
    causes: tuple[int, ...] = ()
    inner: int = 0
    returned: tuple[tuple[Origin, ...], ...] = ()
    first_carry: int = 0


def links_of(plan: Plan, paths: Sequence[str]) -> list[Links]:
    """Returns the links of each row, in the order of the rows, in linear time.

    What a call or a loop reads or stacks was made by the row outside or inside; what a loop
    carries, or the branches of a ``cond`` return, has several makers and counts as made by the row
    of the loop or ``cond``.

    Args:
        plan: The plan of the whole program.
        paths: The path of each of its inputs in the arguments.
    """
    links: list[Links] = []
    _walk(plan, paths, links)
    readers: list[list[int]] = [[] for _ in links]
    for row, link in enumerate(links):
        for made in set(link.operands):
            if isinstance(made, int):
                readers[made].append(row)
    for row, link in enumerate(links):
        link.causes = _causes(row, links, readers[row])
    return links


def _walk(plan: Plan, inputs: Sequence[Origin], links: list[Links]) -> list[Origin]:
    """Appends the links of a jaxpr, and returns where its outputs come from."""
    body = plan.jaxpr
    env: dict[Any, Origin] = dict.fromkeys(body.constvars)
    env.update(zip(body.invars, inputs, strict=True))
    for eqn, equation in zip(body.eqns, plan.equations, strict=True):
        given = [_origin(v, env) for v in eqn.invars]
        row = len(links)
        links.append(Links(eqn.primitive.name, equation, tuple(given)))
        results = [row] * len(eqn.outvars)
        if equation.inner:
            results = _inside(row, eqn, given, links)
            links[row].inner = len(links) - row - 1
        env.update(zip(eqn.outvars, results, strict=True))
    return [_origin(v, env) for v in body.outvars]


def _origin(atom: Any, env: dict[Any, Origin]) -> Origin:
    return None if isinstance(atom, Literal) else env[atom]


def _inside(row: int, eqn: Any, given: list[Origin], links: list[Links]) -> list[Origin]:
    """Appends the links of what is inside an equation, and returns where its results come from."""
    link = links[row]
    name, inner = link.primitive, link.plan.inner
    if name == "scan":
        consts, count = scan_split(eqn.params)
        end = consts + count
        made = _walk(inner[0], [*given[:consts], *[row] * count, *given[end:]], links)
        link.returned, link.first_carry = _alone(made[:count]), consts
        return [*[row] * count, *_outside(row, inner[0], made)[count:]]
    if name == "while":
        conds = eqn.params["cond_nconsts"]
        start = conds + eqn.params["body_nconsts"]
        carries: list[Origin] = [row] * (len(given) - start)
        _walk(inner[0], [*given[:conds], *carries], links)
        link.returned = _alone(_walk(inner[1], [*given[conds:start], *carries], links))
        link.first_carry = start
        return carries
    if name == "cond":
        link.returned = tuple(zip(*[_walk(b, given[1:], links) for b in inner], strict=True))
        return [row] * len(eqn.outvars)
    made = _walk(inner[0], given, links)
    link.returned = _alone(made)
    return _outside(row, inner[0], made)


def _alone(made: Sequence[Origin]) -> tuple[tuple[Origin, ...], ...]:
    return tuple((origin,) for origin in made)


def _outside(row: int, inner: Plan, made: list[Origin]) -> list[Origin]:
    """Where results come from: from the row itself if it casts them, or returns a constant."""
    pairs = zip(made, inner.output_dtypes, strict=True)
    return [row if cast is not None or origin is None else origin for origin, cast in pairs]


# --- what a reason points at ----------------------------------------------------------------


def _causes(row: int, links: list[Links], readers: list[int]) -> tuple[int, ...]:
    link = links[row]
    reason = link.plan.reason
    if reason.code in _OF_READERS:
        return _reader(reason.cause.removeprefix("read by "), links, readers)
    origins = [link.operands[i] for i in reason.operands]
    if reason.code in (ReasonCode.CARRY, ReasonCode.CARRY_ACCUMULATOR):
        for i in reason.operands:
            origins += link.returned[i - link.first_carry]
    elif reason.code is ReasonCode.BRANCH_JOIN:
        casts = zip(*(branch.output_dtypes for branch in link.plan.inner), strict=True)
        for made, dtypes in zip(link.returned, casts, strict=True):
            origins += made if any(dtypes) else ()
    elif reason.code is ReasonCode.STRUCTURAL:
        for made in link.returned:
            origins += made
        if not link.plan.inner:
            origins += link.operands
    rows = [origin for origin in origins if isinstance(origin, int) and origin != row]
    return tuple(dict.fromkeys(rows))


def _reader(name: str, links: list[Links], readers: list[int]) -> tuple[int, ...]:
    """The first reader of that name, or the one in the call or loop of that name.

    A body that is called twice has one plan, with the name of one reader: for want of it, the first
    reader.
    """
    if name == "the output" or not readers:
        return ()
    reader = next((r for r in readers if links[r].primitive == name), readers[0])
    inside = range(reader + 1, reader + 1 + links[reader].inner)
    within = (r for r in readers if r in inside and not links[r].inner)
    return (next(within, reader),)
