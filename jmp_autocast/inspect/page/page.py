"""Writes a report as a single HTML page without scripts.

Texts from the user's program (scopes, names, source lines) are escaped.
"""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, TypeAlias

from ...interpreters.plan.data import ReasonCode
from ..export import scaled
from ..report.reasons import explanations
from ..report.rows import SHORT, Row
from ..report.totals import dtype_of, is_float

Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""A title, the titles of the columns, and the rows; numbers are right-aligned."""


def page_text(
    name: str,
    summary: str,
    facts: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    tables: Sequence[Table],
) -> str:
    """Returns the text of a page.

    Args:
        name: The name of the program.
        summary: The report in one line.
        facts: The totals, each as a name and a text.
        rows: The equations, in program order.
        tables: The tables to show before the equations; a table without rows is left out.
    """
    parts = {
        "name": _shown(name),
        "summary": _shown(summary),
        "style": _file("page.css"),
        "facts": "\n".join(f"<dt>{_shown(k)}</dt><dd>{_shown(text)}</dd>" for k, text in facts),
        "tables": "\n".join(_table(*each) for each in tables if each[2]),
        "equations": "\n".join(_equations(rows)),
        "reasons": "\n".join(map(_reason, sorted({row.reason for row in rows}))),
    }
    # All slots of the template are filled in one pass. An inserted text may look like a slot, and
    # must stay as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _file("page.html"))


@functools.cache
def _file(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


def _shown(text: object) -> str:
    """Returns a text as HTML; surrogates, which UTF-8 cannot encode, are replaced."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def _link(index: int) -> str:
    return f'<a href="#equation-{index}">#{index}</a>'


def _row(cells: Iterable[str], tag: str = "td", attributes: str = "") -> str:
    return f"<tr{attributes}>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    body = "\n".join(f"<tr>{''.join(map(_cell, cells))}</tr>" for cells in rows)
    head = _row(map(_shown, columns), "th")
    return f"<section><h2>{_shown(title)}</h2><table>{head}{body}</table></section>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{_shown(value)}</td>"


# --- equations ----------------------------------------------------------------------------------

_COLUMNS = ("#", "primitive", "operands", "results", "reason", "FLOPs", "source")
_KINDS = {"float16": "low", "bfloat16": "low", "float32": "full"}


def _equations(rows: Sequence[Row]) -> Iterable[str]:
    """Yields a table for each sequence of consecutive equations in one scope."""
    for scope, found in itertools.groupby(rows, lambda row: row.scope):
        inside = list(map(_equation, found))
        title = f"{_shown(scope or '(no scope)')} <small>{len(inside)}</small>"
        table = "\n".join(("<table>", _row(_COLUMNS, "th"), *inside, "</table>"))
        yield f"<details open><summary>{title}</summary>{table}</details>"


def _equation(row: Row) -> str:
    dtype = dtype_of(row)
    kind = _KINDS.get(dtype, "other" if is_float(dtype) else "none")
    operands = map(
        _value, row.operands, row.declared_operands, row.operand_shapes, row.operand_inputs
    )
    links = ("" if index is None else _link(index) for index in row.operand_rows)
    results = map(_value, row.results, row.declared_results, row.result_shapes)
    times = f" <small>{row.times:,} times</small>" if row.times > 1 else ""
    producers = dict.fromkeys(row.operand_rows[i] for i in row.cause_operands)
    causes = " ".join((_shown(row.cause), *(_link(i) for i in producers if i is not None)))
    cells = (
        str(row.index),
        f"{'&emsp;' * row.depth}{_shown(row.primitive)}{times}",
        "<br>".join(map(" ".join, zip(operands, links, strict=True))),
        "<br>".join(results),
        f'<a href="#{row.reason}">{row.reason}</a> {causes}',
        scaled(row.flops).rstrip() if row.flops else "",
        _shown(row.source),
    )
    return _row(cells, attributes=f' id="equation-{row.index}" class="{kind}"')


def _value(dtype: str, declared: str, shape: tuple[int, ...], source: str = "") -> str:
    """Returns the dtype and shape of an operand or result, its declared dtype and its input path.

    ``"bf16[8,8] of f32 0/w"`` is the argument ``0/w``, declared in float32 and read in bfloat16.
    """
    text = f"{SHORT.get(dtype, dtype)}[{','.join(map(str, shape))}]"
    was = "" if dtype == declared else f" of {SHORT.get(declared, declared)}"
    return _shown(f"{text}{was} {source}".rstrip())


def _reason(code: str) -> str:
    explained = explanations()[ReasonCode(code)]
    text = _shown(f"{explained.says} {explained.otherwise}".rstrip())
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    return f'<dt id="{code}">{code}</dt><dd>{text}</dd>'
