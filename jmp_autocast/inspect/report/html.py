"""`Report` -> one HTML page that needs nothing beside itself.

The page is made of the files in ``page/``. Texts of the program (scopes, names, source lines)
reach it in one block of JSON and are shown as text alone.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ..export import plain
from .by_dtype import dtype_of, is_float, nbytes_by_dtype
from .reason_texts import explanations
from .rows import Row, note_on_sizes
from .totals import Totals

_SCRIPTS = ("rows.js", "text.js", "chart.js", "tree.js", "table.js", "panel.js", "report.js")

# What the page may do: run and apply what is in it, by hash, and nothing else.
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)

# In JSON a letter may stand as its number: nothing in the block looks like a tag or a comment.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}

# Columns whose values stand in the rows themselves. They are short, and mostly different: of the
# others a program of 2,000 equations has few, and each is in the page once.
_OWN = frozenset("depth inner times flops nbytes declared_nbytes operand_rows cause_rows".split())

# The height of the page in a notebook, in pixels: the chart and a screen of rows.
FRAME_HEIGHT = 760


def page_of(
    name: str, compute_dtype: str, summary: str, rows: Sequence[Row], totals: Totals
) -> str:
    """Returns the page of a report.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        summary: The report in one line.
        rows: The equations of the program.
        totals: Their sums.
    """
    template, style, script = _parts()
    sizes = note_on_sizes(rows)
    about = {"name": name, "summary": summary, "compute_dtype": compute_dtype}
    data = plain(about | {"totals": plain(totals)} | _columns_of(rows), finite=True)
    policy = _POLICY.format(script=_hash(script), style=_hash(style))
    parts = {
        "policy": html.escape(policy),
        "title": _ascii(html.escape(f"{name} in {compute_dtype}")),
        "summary": _ascii(html.escape("; ".join(filter(None, [summary, sizes])))),
        "style": style,
        "data": json.dumps(data, separators=(",", ":")).translate(_ESCAPES),
        "script": script,
    }
    # One pass: what is filled in is not searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], template)


def frame_of(summary: str, page: str) -> str:
    """Returns a frame that holds a page: it shares no style, script or storage with a notebook.

    Args:
        summary: What it shows, in one line.
        page: The page.
    """
    return (
        f'<iframe title="{_ascii(html.escape(summary))}" sandbox="allow-scripts" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def _columns_of(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page shows: rows as lists, in which numbers stand for repeated values."""
    numbers: dict[Any, int] = {}  # from a value to its position in the list of the page
    fields = [f.name for f in dataclasses.fields(Row) if f.name != "index"]
    derived = {"dtype": dtype_of, "nbytes_by_dtype": lambda row: (*nbytes_by_dtype(row).items(),)}
    lists = []
    for row in rows:
        cells = {name: getattr(row, name) for name in fields}
        cells |= {name: of_row(row) for name, of_row in derived.items()}
        lists.append(
            [x if k in _OWN else numbers.setdefault(x, len(numbers)) for k, x in cells.items()]
        )
    columns = [*fields, *derived]
    # The page colors floats, and does not know the names of all float dtypes.
    names = {name for row in rows for name in (*row.operands, *row.results)}
    return {
        "floats": sorted(filter(is_float, names)),
        "explanations": {code.value: text for code, text in explanations().items()},
        "columns": columns,
        "shared": [name for name in columns if name not in _OWN],
        "rows": lists,
        "values": list(numbers),
    }


@functools.cache
def _parts() -> tuple[str, str, str]:
    """The template, the style and the script; a line end of another kind would change a hash."""
    folder = resources.files(__package__ or "") / "page"
    read = lambda name: (folder / name).read_text(encoding="utf-8")  # noqa: E731
    script = "\n".join(["", '"use strict";', "", *map(read, _SCRIPTS)])
    return read("report.html"), "\n" + read("report.css"), script


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _ascii(text: str) -> str:
    """Any text, also half a pair of surrogates, which no file can hold."""
    return text.encode("ascii", "xmlcharrefreplace").decode()
