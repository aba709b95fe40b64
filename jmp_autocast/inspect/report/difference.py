"""Two policies side by side: what a program costs under each, and which equations differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ..export import WIDTH, counted, cut, scaled, table
from ..page.page import Page, Paged, section, tables_page
from .by_dtype import by_dtype
from .row_texts import reason_of, short_dtypes
from .rows import Row
from .totals import Totals

# A screen of changes. A program of 48 layers may have thousands.
_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class Change:
    """One equation that two policies treat differently.

    Args:
        before: The row under the first policy.
        after: The row under the second.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((4, 4))
        >>> careful = explain(f, x, policy=BF16.with_level("tensor_cores"))
        >>> (change,) = explain(f, x, policy=BF16).diff(careful)
        >>> change.before.reason, change.after.results
        ('PROMOTE_LOW', ('float32',))
    """

    before: Row
    after: Row

    def __str__(self) -> str:
        """Returns the change in two lines."""
        where = (
            f"{self.before.primitive} in {self.before.scope or 'no scope'} ({self.before.source})"
        )
        was, now = (f"{short_dtypes(row)} {reason_of(row)}" for row in (self.before, self.after))
        return f"{cut(where)}\n    {cut(f'{was}  =>  {now}', WIDTH - 4)}"


@dataclasses.dataclass(frozen=True)
class Difference(Paged):
    """What ``report.difference(other)`` returns.

    Args:
        name: The function's name.
        equations: The number of equations.
        totals: What the program costs, before and after, by what it is: FLOPs and bytes of each
            dtype, casts, bytes kept for the backward pass. None where it is not known.
        changes: The equations whose dtypes differ, in program order.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((4, 4))
        >>> careful = explain(f, x, policy=BF16.with_level("tensor_cores"))
        >>> explain(f, x, policy=BF16).difference(careful).totals["FLOPs in bfloat16"]
        (144, 128)
    """

    _computed: ClassVar[tuple[str, ...]] = ("summary",)

    name: str
    equations: int
    totals: Mapping[str, tuple[int | None, int | None]]
    changes: tuple[Change, ...]

    @property
    def summary(self) -> str:
        """The difference in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> report = explain(jnp.tanh, jnp.ones(4), policy=BF16)
            >>> report.difference(report).summary
            'tanh: 0 of 1 equation differ'
        """
        count = counted(self.equations, "equation")
        return cut(f"{self.name}: {len(self.changes)} of {count} differ")

    def __str__(self) -> str:
        """Returns the summary, a table of totals, and one of the equations that differ."""
        columns = {"before": ">9", "after": ">9", "total": ""}
        lines = table(columns, list(self.totals.items()), _total)
        changed = {"primitive": "16", "before": "16", "after": "16", "scope": "18", "because": ""}
        if self.changes:
            lines += ["", *table(changed, self.changes, _cells, _SHOWN, "more in .changes")]
        return "\n".join([self.summary, "", *lines])

    def _page(self) -> Page:
        """Returns the page: the two tables, with all changes."""
        columns = "primitive, before, after, scope, because, because now, source"
        rows = [
            (
                each.before.primitive,
                *map(short_dtypes, (each.before, each.after)),
                each.before.scope,
                *map(reason_of, (each.before, each.after)),
                each.before.source,
            )
            for each in self.changes
        ]
        totals = [(name, *map(_number, pair)) for name, pair in self.totals.items()]
        sections = [
            section("What the program costs", "total, before, after", totals),
            section("Equations whose dtypes differ", columns, rows),
        ]
        return tables_page("Two policies", self.name, self.summary, sections)


def _number(value: int | None) -> str:
    return "not known" if value is None else scaled(value).rstrip()


def _total(item: tuple[str, tuple[int | None, int | None]]) -> list[Any]:
    name, pair = item
    return [*map(_number, pair), name]


def _cells(change: Change) -> list[Any]:
    before, after = change.before, change.after
    dtypes = [short_dtypes(row) for row in (before, after)]
    return [before.primitive, *dtypes, before.scope, reason_of(after)]


class Side(NamedTuple):
    """What is compared of a report.

    Args:
        name: The function's name.
        rows: The equations of the program.
        totals: Their sums.
    """

    name: str
    rows: tuple[Row, ...]
    totals: Totals


def difference_of(before: Side, after: Side, by: str) -> Difference:
    """Returns two reports side by side.

    Args:
        before: The report under the first policy.
        after: The report under the second.
        by: The public method that compares them, for the message.

    Raises:
        ValueError: The reports are of different programs.
    """
    if _program(before.rows) != _program(after.rows):
        raise ValueError(
            f"{by} compares policies on one program, but {before.name} and {after.name} "
            "are different programs. Explain the same function on arguments of the same shapes."
        )
    pairs = zip(before.rows, after.rows, strict=True)
    changes = [Change(a, b) for a, b in pairs if (a.operands, a.results) != (b.operands, b.results)]
    return Difference(before.name, len(before.rows), _totals(before, after), tuple(changes))


def _totals(before: Side, after: Side) -> dict[str, tuple[int | None, int | None]]:
    shares = by_dtype(before.rows), by_dtype(after.rows)
    names = list(dict.fromkeys([*shares[0], *shares[1]]))
    found: dict[str, tuple[int | None, int | None]] = {}
    for field, title in (("flops", "FLOPs"), ("nbytes", "bytes")):
        for name in names:
            of_dtype = [getattr(share[name], field) if name in share else 0 for share in shares]
            if any(of_dtype):
                found[f"{title} in {name}"] = (of_dtype[0], of_dtype[1])
    totals = before.totals, after.totals
    casts = [(x.casts.down + x.casts.up, x.casts.down_nbytes + x.casts.up_nbytes) for x in totals]
    found["casts"], found["bytes of casts"] = zip(*casts, strict=True)
    found["16-bit copies of parameters"] = (totals[0].cast_parameters, totals[1].cast_parameters)
    kept = [x.residual_nbytes for x in totals]
    found["bytes kept for the backward pass"] = (kept[0], kept[1])
    return found


def _program(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    # Of dtypes only those that the program declares: the others are what policies change.
    return [(r.primitive, r.depth, r.operand_shapes, r.declared_operands) for r in rows]
