"""A report as an HTML page that needs nothing beside itself, and runs nothing.

Filters are radio buttons that rules of the style look at. Texts of the program (scopes, names,
source lines) reach the page escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias

# The page may apply the style that is in it, by hash, and nothing else.
_POLICY = "default-src 'none'; style-src '{style}'; img-src data:; base-uri 'none'"

# Characters that would hide, or reverse what follows them.
_UNSEEN = re.compile(
    "[\0-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

Row: TypeAlias = Mapping[str, Any]
"""An equation. Of its keys ``kind`` is ``"low"``, ``"full"``, ``"other"`` or ``"none"``,
``operands`` are pairs of a text and the index of the row that made it, or None."""

Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""A title, the titles of the columns, and the rows; numbers stand at the right."""


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
        facts: The totals: a name and a text.
        rows: The equations, in program order.
        tables: Tables that stand before the equations; one without rows is left out.
    """
    style = _file("page.css") + "\n".join(_rules(rows))
    parts = {
        "policy": html.escape(_POLICY.format(style=_hash(style))),
        "name": _shown(name),
        "summary": _shown(summary),
        "style": style,
        "facts": "\n".join(f"<dt>{_shown(k)}</dt><dd>{_shown(text)}</dd>" for k, text in facts),
        "tables": "\n".join(_table(*each) for each in tables if each[2]),
        "filters": "\n".join(_filters(rows)),
        "equations": "\n".join(_equations(rows)),
        "reasons": "\n".join(_reasons(rows)),
    }
    # One pass: what is filled in is not searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _file("page.html"))


@functools.cache
def _file(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _shown(text: object) -> str:
    """Returns a text as HTML; characters that are not seen are shown by their numbers."""
    return html.escape(_UNSEEN.sub(lambda c: f"\u27e8U+{ord(c[0]):04X}\u27e9", str(text)))


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", _shown(text))


def _link(index: int) -> str:
    return f'<a href="#equation-{index}">#{index}</a>'


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{_shown(each)}</th>" for each in columns)
    return f"<section><h2>{_shown(title)}</h2><table><tr>{head}</tr>{_body(rows)}</table></section>"


def _body(rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"<tr>{''.join(map(_cell, cells))}</tr>" for cells in rows)


def _cell(value: Any) -> str:
    is_number = isinstance(value, int | float)
    text = f"{value:,}" if is_number else _shown(value)
    return f'<td class="number">{text}</td>' if is_number else f"<td>{text}</td>"


# --- equations ----------------------------------------------------------------------------------

_COLUMNS = ("#", "primitive", "operands", "results", "reason", "FLOPs", "source")


def _equations(rows: Sequence[Row]) -> Iterable[str]:
    """Yields a table for each run of equations in one scope."""
    head = "".join(f"<th>{each}</th>" for each in _COLUMNS)
    for scope, found in itertools.groupby(rows, lambda row: row["scope"]):
        inside = list(found)
        title = f"{_shown(scope or '(no scope)')} <small>{len(inside)}</small>"
        body = "\n".join(map(_equation, inside))
        table = f"<table><tr>{head}</tr>{body}</table>"
        yield f"<details open><summary>{title}</summary>{table}</details>"


def _equation(row: Row) -> str:
    operands = "<br>".join(
        f"{_shown(text)} {'' if maker is None else _link(maker)}" for text, maker in row["operands"]
    )
    results = "<br>".join(map(_shown, row["results"]))
    times = f" <small>{row['times']:,} times</small>" if row["times"] > 1 else ""
    causes = "".join(f" {_link(each)}" for each in row["cause_rows"])
    reason = f'<a href="#{row["reason"]}">{row["reason"]}</a> {_shown(row["cause"])}{causes}'
    classes = f"{row['kind']} {row['reason']}{' changed' if row['changed'] else ''}"
    primitive = f"{'&emsp;' * row['depth']}{_shown(row['primitive'])}{times}"
    return (
        f'<tr id="equation-{row["index"]}" class="{classes}"><td>{row["index"]}</td>'
        + "".join(f"<td>{cell}</td>" for cell in (primitive, operands, results, reason))
        + f'<td class="number">{_shown(row["flops"])}</td><td>{_shown(row["source"])}</td></tr>'
    )


def _reasons(rows: Sequence[Row]) -> Iterable[str]:
    for code, text in sorted({row["reason"]: row["explanation"] for row in rows}.items()):
        yield f'<dt id="{code}">{code}</dt><dd>{_with_code(text)}</dd>'


# --- filters ------------------------------------------------------------------------------------

_KINDS = {"low": "16 bits", "full": "float32", "other": "other floats", "none": "no float"}


def _choices(rows: Sequence[Row]) -> dict[str, tuple[str, int]]:
    """Returns what rows are filtered by: the title and the count of each class of rows."""
    kinds, reasons = Counter(r["kind"] for r in rows), Counter(r["reason"] for r in rows)
    changed = sum(row["changed"] for row in rows)
    found = {kind: (title, kinds[kind]) for kind, title in _KINDS.items()}
    found |= {"changed": ("changed by the policy", changed)}
    found |= {code: (code, count) for code, count in reasons.most_common()}
    return {name: choice for name, choice in found.items() if choice[1]}


def _filters(rows: Sequence[Row]) -> Iterable[str]:
    everything = {"all": ("all", len(rows))}
    for name, (title, count) in (everything | _choices(rows)).items():
        checked = " checked" if name == "all" else ""
        yield (
            f'<label><input type="radio" name="filter" value="{name}"{checked}> {title} '
            f"<small>{count}</small></label>"
        )


def _rules(rows: Sequence[Row]) -> Iterable[str]:
    """Yields the rules of the style that hide what a filter leaves out."""
    for name in _choices(rows):
        chosen = f'#equations:has([value="{name}"]:checked)'
        left_out = f"{chosen} tr[id]:not(.{name}), {chosen} details:not(:has(.{name}))"
        yield left_out + " { display: none; }"
