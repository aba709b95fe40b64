"""Tables of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .measure import Row

Column = tuple[str, Callable[[Row], float | None], str]


def _in(unit: float, value: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    def scaled(row: Row) -> float | None:
        found = value(row)
        return None if found is None else found / unit

    return scaled


COLUMNS: tuple[Column, ...] = (
    ("temp MB", _in(1e6, lambda row: row.temporary), "#.4g"),
    ("args MB", _in(1e6, lambda row: row.arguments), "#.4g"),
    ("Mcycles", _in(1e6, lambda row: row.cycles), "#.4g"),
    ("traffic GB", _in(1e9, lambda row: row.traffic), "#.4g"),
    ("TFLOP", _in(1e12, lambda row: row.flops), "#.3g"),
    ("kernels", lambda row: row.kernels, "d"),
    ("converts", lambda row: row.converts, "d"),
    ("convert kernels", lambda row: row.convert_kernels, "d"),
    ("wire MB", _in(1e6, lambda row: row.wire or None), "#.4g"),
    ("trace + lower CPU s", lambda row: row.trace_seconds, ".2f"),
    ("compile s", lambda row: row.compile_seconds, ".1f"),
)
WITHOUT_RATIO = ("args MB", "compile s")
"""Arguments are the same in all variants, and a compile time depends on what else runs."""


def table(rows: Mapping[str, Row], base_of: Callable[[str], str]) -> list[list[str]]:
    """Returns the cells, the header first; behind each number its ratio to the base's.

    Args:
        rows: The rows by name.
        base_of: Names the row that a row is compared with.
    """
    shown = [c for c in COLUMNS if any(c[1](row) for row in rows.values())]
    cells = [["", *(title for title, _, _ in shown), "note"]]
    for name, row in rows.items():
        line = [name]
        for title, value_of, form in shown:
            value = value_of(row)
            base = value_of(rows[base_of(name)]) if base_of(name) in rows else None
            number = "" if value is None else f"{value:{form}}".rstrip(".")
            # adamw needs no temporary bytes on a TPU and 4,612 on an H100: a ratio to that says
            # nothing.
            small = title in WITHOUT_RATIO or (title == "temp MB" and (base or 0) < 1)
            ratio = f" ({value / base:.2f})" if value and base and not small else ""
            line.append(number + ratio)
        cells.append([*line, row.note])
    return cells if any(row.note for row in rows.values()) else [line[:-1] for line in cells]


def line(row: Row) -> str:
    """Returns the numbers of a row, each with its title."""
    values = [(title, value_of(row), form) for title, value_of, form in COLUMNS]
    shown = [f"{title} {value:{form}}".rstrip(".") for title, value, form in values if value]
    return ", ".join([*shown, row.note] if row.note else shown)


def kinds(rows: Mapping[str, Row]) -> list[list[str]]:
    """Returns which products and collectives each program runs, and how often."""
    cells = [["", "kind", "runs", "amount"]]
    for name, row in rows.items():
        for kind, (times, flops) in row.products.items():
            cells.append([name, kind, str(times), f"{flops / 1e12:.3g} TFLOP"])
        for kind, (times, nbytes) in row.collectives.items():
            cells.append([name, kind, str(times), f"{nbytes / 1e6:.4g} MB"])
    return cells
