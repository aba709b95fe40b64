"""Reads the tables of benchmarks/RESULTS.md, for pages and pictures that quote them."""

from __future__ import annotations

import pathlib
import re

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"

Table = dict[str, dict[str, str]]
"""From the name of a row to its cells by column."""


def section(marker: str) -> str:
    """Returns the text between ``<!-- marker -->`` and ``<!-- end of marker -->``."""
    text = RESULTS.read_text(encoding="utf-8")
    start, end = f"<!-- {marker} -->", f"<!-- end of {marker} -->"
    if start not in text or end not in text:
        raise LookupError(f"{RESULTS} has no results of {marker!r}")
    return text.partition(start)[2].partition(end)[0]


def handwritten(marker: str) -> dict[str, dict[str, Table]]:
    """Returns the tables against hand-written mixed precision.

    Args:
        marker: Such as ``"vs_handwritten full bfloat16 2-core CPU"``.

    Returns:
        From a model's heading to its tables by name, such as ``"Memory"``.
    """
    models: dict[str, dict[str, Table]] = {}
    for part in section(marker).split("\n### ")[1:]:
        heading, _, body = part.partition("\n")
        named = re.findall(r"^([A-Z][^\n|]*):\n\n((?:\|.*\n?)+)", body, re.MULTILINE)
        models[heading] = {name: _table(text) for name, text in named}
    return models


def sections(prefix: str) -> list[tuple[str, str]]:
    """Returns the markers that begin with a word, each with the text behind it, in their order."""
    text = RESULTS.read_text(encoding="utf-8")
    markers = re.findall(rf"<!-- ({prefix}.*) -->", text)
    return [(marker, section(marker)) for marker in markers]


def tables(marker: str) -> list[Table]:
    """Returns all tables of a section."""
    return tables_in(section(marker))


def tables_in(text: str) -> list[Table]:
    """Returns all tables of a text."""
    return [_table(rows) for rows in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)]


def number(cell: str) -> float:
    """Returns the number of a cell such as ``141.916 (1.61)``, without the ratio."""
    return float(cell.split()[0])


def ratio(cell: str) -> float:
    """Returns the ratio of a cell such as ``141.916 (1.61)``."""
    return float(re.findall(r"\((.*)\)", cell)[0])


def _table(text: str) -> Table:
    header, _, *rows = ([c.strip() for c in r.strip("|").split("|")] for r in text.splitlines())
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
