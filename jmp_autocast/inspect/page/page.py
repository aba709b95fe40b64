"""A report as an HTML page that needs nothing beside itself.

The template, the style and the scripts are the other files of this folder. Texts of the program
(scopes, names, source lines) reach the page in one block of JSON and are shown as text alone.
"""

from __future__ import annotations

import abc
import base64
import functools
import hashlib
import html
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from ..export import Exported, plain, saved

# What the cells of a column are, by its title: scaled numbers and bytes, counts, relative errors,
# which have a bar. All others are texts.
_KINDS = {
    **dict.fromkeys(("introduced", "error", "error of cotangents", "of all"), "error"),
    **dict.fromkeys(("times", "steps", "lost", "cotangents lost", "devices"), "count"),
    **dict.fromkeys(("FLOPs", "largest", "sent"), "number"),
    **dict.fromkeys(("bytes", "bytes kept", "bytes computed again", "bytes in float32"), "bytes"),
    "gain": "gain",
    **dict.fromkeys(("float32", "by default", "TF32", "16 bits", "float8", "wire"), "seconds"),
}
# Of which field of an item, where the title is no name of one.
_FIELDS = {
    **dict.fromkeys(("made by", "operation"), "primitive"),
    **{"read by": "readers", "because": "reason", "computed again": "recomputed"},
    **{"bytes": "nbytes", "FLOPs": "flops"},
    **{"error of cotangents": "cotangent_error", "cotangents lost": "cotangent_lost"},
}

# A page of rows has modules, a chart and a panel for each row; a page of tables has tables.
_SCRIPTS = {
    "rows": (
        "text.js",
        "rows.js",
        "chart.js",
        "tree.js",
        "table.js",
        "panel.js",
        "sections.js",
        "report.js",
    ),
    "tables": ("text.js", "chart.js", "table.js", "sections.js", "tables.js"),
}

# What the page may do: run and apply what is in it, by hash, and nothing else.
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)

# In JSON a letter may stand as its number: nothing in the block looks like a tag or a comment.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}

# The height of the page in a notebook, in pixels: the chart and a screen of rows.
_FRAME_HEIGHT = 760


class Page(NamedTuple):
    """What a page shows.

    Args:
        kind: What it is made of: ``"rows"`` or ``"tables"``.
        about: What kind of report it is.
        name: The name of the program.
        summary: The report in one line.
        data: The rest, as the scripts of its kind read it.
    """

    kind: str
    about: str
    name: str
    summary: str
    data: Mapping[str, Any]


def section(title: str, columns: str, items: Sequence[Any]) -> dict[str, Any]:
    """Returns a table of a page.

    Args:
        title: Its title.
        columns: The titles of its columns, between commas.
        items: What has a row: a tuple of cells, or an object with a field for each column.
    """
    titles = columns.split(", ")
    fields = [_FIELDS.get(each, each) for each in titles]

    def cells(item: Any) -> Sequence[Any]:
        return item if isinstance(item, tuple) else [_text(getattr(item, name)) for name in fields]

    kinds = [(each, _KINDS.get(each, "text")) for each in titles]
    return {"title": title, "columns": kinds, "rows": list(map(cells, items))}


def _text(cell: Any) -> Any:
    is_words = isinstance(cell, tuple) and all(isinstance(word, str) for word in cell)
    return ", ".join(cell) if is_words else cell


def tables_page(
    about: str, name: str, summary: str, sections: Sequence[Any], cuts: Sequence[Any] = ()
) -> Page:
    """Returns a page of tables, those without a row left out, and of pictures of cuts."""
    data = {"sections": [each for each in sections if each["rows"]], "cuts": cuts}
    return Page("tables", about, name, summary, data)


class Paged(Exported, abc.ABC):
    """A report that has an HTML page."""

    @abc.abstractmethod
    def _page(self) -> Page:
        """Returns the page."""

    def to_html(self, path: str | pathlib.Path | None = None) -> str:
        """Returns the report as an HTML page, to be opened in any browser.

        Its tables can be sorted and searched. It is one file that asks nothing of a network, and
        shows names and source lines of the program as text alone.

        Args:
            path: A file to write it to as well.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain
            >>> page = explain(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))).to_html()
            >>> page.splitlines()[0]
            '<!doctype html>'
        """
        return saved(page_text(self._page()), path)

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks.

        It shares no style, script or storage with the notebook.
        """
        page = self._page()
        return (
            f'<iframe title="{_escaped(page.summary)}" sandbox="allow-scripts" '
            f'style="width:100%;height:{_FRAME_HEIGHT}px;border:0" '
            f'srcdoc="{html.escape(page_text(page))}"></iframe>'
        )


def page_text(page: Page) -> str:
    """Returns the text of a page.

    Args:
        page: What it shows.
    """
    style, script = "\n" + _file("page.css"), _script(page.kind)
    data = {"name": page.name, "summary": page.summary, **page.data}
    parts = {
        "policy": html.escape(_POLICY.format(script=_hash(script), style=_hash(style))),
        "about": _escaped(page.about),
        "title": _escaped(f"{page.name}: {page.about}"),
        "summary": _escaped(page.summary),
        "style": style,
        "body": _file(f"{page.kind}.html"),
        "data": json.dumps(plain(data, finite=True), separators=(",", ":")).translate(_ESCAPES),
        "script": script,
    }
    # One pass: what is filled in is not searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _file("page.html"))


@functools.cache
def _file(name: str) -> str:
    """A file of this folder; a line end of another kind would change a hash."""
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


@functools.cache
def _script(kind: str) -> str:
    return "\n".join(["", '"use strict";', "", *map(_file, _SCRIPTS[kind])])


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    """Any text, also half a pair of surrogates, which no file can hold."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()
