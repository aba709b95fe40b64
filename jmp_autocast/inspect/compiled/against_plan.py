"""Planned against made: where a compiled program computes otherwise than its plan says.

Both name source lines. What a line multiplies is compared as a whole, in FLOPs by dtype: a compiler
merges, splits and reorders what stands in one line. What it moves from one line to another, and
what a plan does not hold (collectives that the compiler inserts, roundings that it drops), is not
known.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...policies import CONTRACTIONS
from ..report.report import Report
from ..report.rows import Row
from ..report.wire import COLLECTIVES, collective_of
from .hlo import UnreadableError
from .report import CompiledCollective, CompiledProduct, Deviation, wider

# Of the FLOPs of a line: less is padding, counted here and not there.
_SMALL = 0.05
# A product that is computed twice, and not one that is split.
_TWICE = 1.5
_NARROW = ("bfloat16", "float16")


class Compared(NamedTuple):
    """What a comparison found.

    Args:
        deviations: What differs.
        unmatched_flops: The planned FLOPs at lines without a compiled product.
    """

    deviations: tuple[Deviation, ...]
    unmatched_flops: int


def compared(
    plan: Report,
    products: Sequence[CompiledProduct],
    collectives: Sequence[CompiledCollective],
) -> Compared:
    """Compares what was planned with what was made.

    Args:
        plan: The report of `explain`.
        products: The products of the compiled program.
        collectives: Its collectives.

    Raises:
        UnreadableError: No product of the plan has a line that the compiled program has.
    """
    planned: dict[str, list[Row]] = collections.defaultdict(list)
    for row in plan.rows:
        if row.primitive in CONTRACTIONS and row.flops:
            planned[line_of(row.source)].append(row)
    made: dict[str, list[CompiledProduct]] = collections.defaultdict(list)
    for product in products:
        made[line_of(product.source)].append(product)
    shared = planned.keys() & made.keys()
    if planned and made.keys() - {""} and not shared:
        raise UnreadableError(
            f"The compiled program is not {plan.name}: none of its products comes from a line of "
            f"the plan. The plan has products at {next(iter(planned))}, the compiled program at "
            f"{next(filter(None, made))}. Pass the program that was "
            "compiled from this function, or leave the plan out."
        )
    # A compiler drops the line of a convolution that it writes anew. What is left on both sides is
    # compared as one.
    others = [row for line in planned.keys() - shared for row in planned[line]]
    pairs = [(planned[line], made[line]) for line in planned if line in shared]
    nowhere = [dataclasses.replace(row, scope="", source="") for row in others]
    pairs += [(nowhere, made[""])] if others else []
    found = [deviation for pair in pairs for deviation in _of_line(*pair)]
    missing = 0 if made[""] else sum(row.flops for row in others)
    return Compared((*found, *_wires(plan.rows, collectives)), missing)


def line_of(source: str) -> str:
    """Returns the file and line of a source: `explain` adds columns and the function's name.

    Example:
        >>> line_of("/model.py:12:8 (loss)"), line_of("/model.py:12")
        ('/model.py:12', '/model.py:12')
    """
    found = re.match(r"(.*?:\d+)", source)
    return found[1] if found else source


def _of_line(rows: Sequence[Row], made: Sequence[CompiledProduct]) -> Iterator[Deviation]:
    if not made or any(product.flops is None for product in made):
        return
    place = rows[0].scope, line_of(rows[0].source)
    asked, ran = collections.Counter[str](), collections.Counter[str]()
    for row in rows:
        asked[wider(row.operands[:2])] += row.flops
    for product in made:
        ran[wider(product.operands)] += product.flops or 0
    least = _SMALL * asked.total()
    for low in _NARROW:
        other = "float32"
        missing, more = asked[low] - ran[low], ran[other] - asked[other]
        if min(missing, more) > least:
            yield Deviation("wider", low, other, min(missing, more), *place)
        if min(-missing, -more) > least:
            yield Deviation("narrower", other, low, min(-missing, -more), *place)
    sums = {p.sums: 0 for p in made if p.sums in _NARROW}
    for dtype in sums:
        flops = sum(p.flops or 0 for p in made if p.sums == dtype)
        yield Deviation("sums", "float32", dtype, flops, *place)
    if ran.total() > _TWICE * asked.total():
        more = ran.total() - asked.total()
        yield Deviation("repeated", str(asked.total()), str(ran.total()), more, *place)


def _wires(rows: Sequence[Row], made: Sequence[CompiledCollective]) -> Iterator[Deviation]:
    """Yields the collectives of the program itself that run in more bits than they were planned."""
    for row in rows:
        if not (name := collective_of(row.primitive)):
            continue
        kind = COLLECTIVES[name].compiled
        line = line_of(row.source)
        dtypes = {c.dtype for c in made if c.kind == kind and line_of(c.source) == line}
        for dtype in sorted(dtypes):
            if row.operands and row.operands[0] in _NARROW and dtype == "float32":
                yield Deviation("wire", row.operands[0], dtype, 0, row.scope, line)
