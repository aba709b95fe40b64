"""One HTML page without scripts: pictures, and tables with a bar for each error.

Texts of a program reach the page escaped, and are shown as text alone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple

# A bar is as long as the logarithm of an error: from 1e-7, a rounding of float32, to 1.
_DECADES = 7


class Column(NamedTuple):
    """A column of a table.

    Args:
        title: Its title.
        is_error: Its cells are relative errors, and have a bar.
    """

    title: str
    is_error: bool = False


class Figure(NamedTuple):
    """A picture.

    Args:
        title: Its title.
        markup: The picture as SVG, in which the texts of a program are escaped.
        caption: What it shows.
    """

    title: str
    markup: str
    caption: str


def static_page(
    title: str,
    summary: str,
    sections: Iterable[tuple[str, Sequence[Column], Sequence[Sequence[Any]]]],
    figures: Iterable[Figure] = (),
) -> str:
    """Returns a page.

    Args:
        title: Its title.
        summary: The line below.
        sections: A heading, columns and rows each; those without a row are left out.
        figures: Pictures, which stand above the tables.
    """
    style = (resources.files(__package__ or "") / "static_page.css").read_text("utf-8")
    title = html.escape(title)
    return (
        "\n".join(
            [
                "<!doctype html>",
                '<html lang="en"><head><meta charset="utf-8">',
                # No script may run, whatever a name in the program looks like.
                '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
                "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'\">",
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<link rel="icon" href="data:,"><title>{title}</title>',
                f"<style>{style}</style></head>",
                f"<body><h1>{title}</h1><p>{html.escape(summary)}</p>",
                *map(_picture, figures),
                *(_section(*each) for each in sections if each[2]),
                "</body></html>",
                "",
            ]
        )
        .encode("ascii", "xmlcharrefreplace")
        .decode()
    )


def _picture(figure: Figure) -> str:
    return (
        f"<section><h2>{html.escape(figure.title)}</h2><div>{figure.markup}</div>"
        f"<p>{html.escape(figure.caption)}</p></section>"
    )


def _section(title: str, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column.title)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(map(_cell, columns, row)) + "</tr>" for row in rows)
    return (
        f"<section><h2>{html.escape(title)}</h2><div><table><thead><tr>{head}</tr></thead>"
        f"<tbody>\n{body}\n</tbody></table></div></section>"
    )


def _cell(column: Column, value: Any) -> str:
    if not column.is_error:
        return f"<td>{html.escape(str(value))}</td>"
    digits = math.log10(value) if 0 < value < math.inf else (0 if value else -_DECADES)
    share = min(max(1 + digits / _DECADES, 0), 1)
    return f'<td class="error" style="--share:{100 * share:.0f}%">{value:.2g}</td>'
