"""Tables as plain text and Markdown, and their place in a file."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence


def as_text(table: Sequence[Sequence[str]]) -> str:
    """Returns a table in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def write_between_markers(path: pathlib.Path, name: str, text: str) -> None:
    """Replaces what stands between the two markers of a name, or adds both at the end."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text().partition(start)
    _, _, after = rest.partition(end)
    if not found:
        before, after = before.rstrip() + "\n\n", "\n"
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
