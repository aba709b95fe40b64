"""`Comparison` -> one HTML page: tables, with a bar for each error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..static_page import Column, static_page

if TYPE_CHECKING:
    from .comparison import Comparison

# Equations beyond the worst 200 introduce nothing that a reader would look at; JSON has all.
_EQUATIONS = 200


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
            [Column("argument"), error("of all"), error("error"), Column("cosine"), Column("lost")],
            [
                (path, each.share, each.error, f"{each.cosine:.5f}", each.lost)
                for path, each in comparison.by_share()
            ],
        ),
    ]
    title = f"{comparison.name} in {comparison.compute_dtype}"
    return static_page(title, comparison.summary, sections)


_OF_ROWS = [
    *(Column("primitive"), Column("dtype"), Column("introduced", is_error=True)),
    *(Column("error", is_error=True), Column("cosine"), Column("scope"), Column("source")),
]


def _cells(row: Any) -> Sequence[Any]:
    dtype = row.computed or ", ".join(row.dtypes)
    errors = row.introduced, row.error, f"{row.cosine:.5f}"
    return row.primitive, dtype, *errors, row.scope, row.source
