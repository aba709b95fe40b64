"""Rows as the page of a report reads them: as lists, in which numbers stand for repeated values."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from ...interpreters.plan.reasons import ReasonCode
from .rows import Row
from .totals import dtype_of, is_float, nbytes_by_dtype

# Columns whose values stand in the rows themselves. They are short, and mostly different: of the
# others a program of 2,000 equations has few, and each is in the page once.
_OWN = frozenset("depth inner times flops nbytes declared_nbytes operand_rows cause_rows".split())


def data_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what a page knows of rows.

    Args:
        rows: The rows.
    """
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


class Explanation(NamedTuple):
    """What a code says, in Markdown that uses code spans alone.

    Args:
        says: Why the equation runs in its dtypes.
        otherwise: What to do to have it otherwise, ``""`` where nothing can be done or need be.
    """

    says: str
    otherwise: str = ""


@functools.cache
def explanations() -> Mapping[ReasonCode, Explanation]:
    """Returns what each code says. The texts are no code: they stand beside those of the page."""
    text = (resources.files(__package__ or "") / "reasons.toml").read_text("utf-8")
    return {ReasonCode(code): Explanation(**said) for code, said in tomllib.loads(text).items()}
