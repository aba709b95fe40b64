"""`Comparison` -> one HTML page: tables, with a bar for each error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..static_page import Column, static_page
from .comparison_rows import ComparisonRow, GradientError
from .scope_errors import ScopeError

# Equations beyond the worst 200 introduce nothing that a reader would look at; JSON has all.
_EQUATIONS = 200


def page_of(
    title: str,
    summary: str,
    by_scope: Sequence[ScopeError],
    rows: Sequence[ComparisonRow],
    cotangents: Sequence[ComparisonRow],
    gradients: Sequence[tuple[str, GradientError]],
) -> str:
    """Returns the page of a comparison.

    Args:
        title: What was compared.
        summary: The comparison in one line.
        by_scope: The errors of each scope, in program order.
        rows: The equations, the worst first.
        cotangents: The cotangents, the worst first.
        gradients: The gradients with their paths, the worst first.
    """
    error = lambda title: Column(title, is_error=True)  # noqa: E731
    scopes = [
        (
            each.scope or "(no scope)",
            each.introduced,
            each.error,
            *([each.cotangent_error] if gradients else []),
            each.lost + each.cotangent_lost,
        )
        for each in by_scope
    ]
    of_scopes = [Column("scope"), error("introduced"), error("error")]
    if gradients:
        of_scopes.append(error("error of cotangents"))
    sections = [
        ("By scope, in program order", [*of_scopes, Column("lost")], scopes),
        *(
            (heading, _OF_ROWS, [_cells(row) for row in worst[:_EQUATIONS]])
            for heading, worst in (
                ("Equations, the largest introduced error first", rows),
                ("Cotangents, the largest introduced error first", cotangents),
            )
        ),
        (
            "Gradients",
            [Column("argument"), error("of all"), error("error"), Column("cosine"), Column("lost")],
            [
                (path, each.share, each.error, f"{each.cosine:.5f}", each.lost)
                for path, each in gradients
            ],
        ),
    ]
    return static_page(title, summary, sections)


_OF_ROWS = [
    *(Column("primitive"), Column("dtype"), Column("introduced", is_error=True)),
    *(Column("error", is_error=True), Column("cosine"), Column("scope"), Column("source")),
]


def _cells(row: ComparisonRow) -> Sequence[Any]:
    dtype = row.computed or ", ".join(row.dtypes)
    errors = row.introduced, row.error, f"{row.cosine:.5f}"
    return row.primitive, dtype, *errors, row.scope, row.source
