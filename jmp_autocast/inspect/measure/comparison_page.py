"""`Comparison` -> one HTML page without scripts: tables, with a bar for each error.

Texts of the program reach the page escaped, and are shown as text alone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .comparison import Comparison

# Equations beyond the worst 200 introduce nothing that a reader would look at; JSON has all.
_EQUATIONS = 200

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


def page_of(comparison: Comparison) -> str:
    """Returns the page of a comparison.

    Args:
        comparison: The comparison.
    """
    error = lambda title: Column(title, is_error=True)  # noqa: E731
    scopes = [
        (
            each.scope or "(no scope)",
            each.introduced,
            each.error,
            *([each.cotangent_error] if comparison.gradients else []),
            each.lost + each.cotangent_lost,
        )
        for each in comparison.by_scope()
    ]
    of_scopes = [Column("scope"), error("introduced"), error("error")]
    if comparison.gradients:
        of_scopes.append(error("error of cotangents"))
    sections = [
        ("By scope, in program order", [*of_scopes, Column("lost")], scopes),
        *(
            (title, _OF_ROWS, [_cells(row) for row in rows[:_EQUATIONS]])
            for title, rows in (
                ("Equations, the largest introduced error first", comparison.rows),
                ("Cotangents, the largest introduced error first", comparison.cotangents),
            )
        ),
        (
            "Gradients",
            [Column("argument"), error("error"), Column("cosine"), Column("lost")],
            [
                (path, each.error, f"{each.cosine:.5f}", each.lost)
                for path, each in sorted(
                    comparison.gradients.items(), key=lambda item: -item[1].error
                )
            ],
        ),
    ]
    style = (resources.files(__package__ or "") / "comparison.css").read_text("utf-8")
    title = html.escape(f"{comparison.name} in {comparison.compute_dtype}")
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
                f"<body><h1>{title}</h1><p>{html.escape(comparison.summary)}</p>",
                *(_section(*each) for each in sections if each[2]),
                "</body></html>",
                "",
            ]
        )
        .encode("ascii", "xmlcharrefreplace")
        .decode()
    )


_OF_ROWS = [
    *(Column("primitive"), Column("dtype"), Column("introduced", is_error=True)),
    *(Column("error", is_error=True), Column("cosine"), Column("scope"), Column("source")),
]


def _cells(row: Any) -> Sequence[Any]:
    dtype = row.computed or ", ".join(row.dtypes)
    errors = row.introduced, row.error, f"{row.cosine:.5f}"
    return row.primitive, dtype, *errors, row.scope, row.source


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
