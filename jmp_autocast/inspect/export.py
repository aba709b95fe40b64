"""Report output: lines of at most 100 columns, tables, plain data, JSON and files.

All reports use this module, so every JSON text has ``"inf"`` for an infinity.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from jax.export import is_symbolic_dim

NOT_EXPORTED = {"exported": False}
"""The metadata of a dataclass field that `Exported` does not write."""

Item = TypeVar("Item")


class Exported:
    """A dataclass that can be written as plain data and as JSON.

    The written data are the properties named in ``_computed``, and all fields except those with the
    metadata ``NOT_EXPORTED``.
    """

    _computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain dicts, lists, strings and numbers.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> explain(jnp.exp, jnp.ones(4), policy=BF16).to_dict()["rows"][0]["primitive"]
            'exp'
        """
        return plain(self)

    def to_json(self, path: str | pathlib.Path | None = None) -> str:
        """Returns the report as JSON text; an infinity is the string ``"inf"``.

        Python would write ``Infinity``, which is not standard JSON: JavaScript, R and jq reject it.
        ``float("inf")`` reads the string back.

        Args:
            path: A file to write the text to as well.

        Example:
            >>> import json
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> text = explain(jnp.exp, jnp.ones(4), policy=BF16).to_json()
            >>> json.loads(text)["compute_dtype"]
            'bfloat16'
        """
        return saved(json.dumps(plain(self, finite=True), allow_nan=False), path)


def plain(value: Any, *, finite: bool = False) -> Any:
    """Returns dataclasses as dicts and tuples as lists, at any depth.

    If ``finite``, numbers that JSON lacks become strings: ``"inf"``, ``"nan"``, and the name of a
    symbolic length, such as ``"b"``.
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        names = [field.name for field in fields if field.metadata.get("exported", True)]
        # `dataclasses.asdict` would skip properties, and copy the fields that are not exported.
        names += getattr(value, "_computed", ())
        return {name: plain(getattr(value, name), finite=finite) for name in names}
    if isinstance(value, Mapping):
        return {key: plain(x, finite=finite) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x, finite=finite) for x in value]
    if isinstance(value, float):
        return str(value) if finite and not math.isfinite(value) else value
    return str(value) if finite and is_symbolic_dim(value) else value


def saved(text: str, path: str | pathlib.Path | None) -> str:
    """Writes a text to a file if ``path`` is not None, and returns the text."""
    if path is not None:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    return text


# --- text -----------------------------------------------------------------------------------


def cut(text: str, width: int = 100) -> str:
    """Returns a text, shortened to at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def located(*words: str, source: str) -> str:
    """Joins words, such as a primitive and its scope, and a source line without its folders.

    Empty words are left out. The folders are left out because the path of an installed package is
    longer than a line of text.

    Example:
        >>> located("dot_general", "", "mlp", source="/lib/python3.13/flax/linear.py:8:4 (f)")
        'dot_general mlp linear.py:8:4 (f)'
    """
    return " ".join(filter(None, (*words, re.sub(r"^.*[\\/](?=.*:\d)", "", source))))


def scaled(value: float) -> str:
    """Returns a number with three digits and an SI prefix.

    Example:
        >>> scaled(512), scaled(1.5e9)
        ('512 ', '1.5 G')
    """
    # Three digits are enough: the FLOPs of a program are an estimate.
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or unit == "P":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if unit else f"{value:.0f} "


def counted(count: int, one: str, many: str = "") -> str:
    """Returns a number and its noun: ``one``, or ``many``, which is ``one`` + "s" by default.

    Example:
        >>> counted(1, "value"), counted(4096, "value")
        ('1 value', '4,096 values')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def labeled(facts: Mapping[str, str | None]) -> list[str]:
    """Returns a line for each fact, with its name and text; facts that are None are left out.

    Example:
        >>> labeled({"FLOPs": "12 k", "unknown": None})
        ['FLOPs       12 k']
    """
    return [cut(f"{name:12}{text}") for name, text in facts.items() if text is not None]


def table(
    columns: Mapping[str, str],
    items: Sequence[Item],
    cells: Callable[[Item], Sequence[Any]],
    shown: int | None = None,
    more: str = "more",
) -> list[str]:
    """Returns the lines of a table, the titles first.

    Args:
        columns: The titles, each with the format of its cells: ``">10.2g"`` for right-aligned
            numbers, ``"22"`` for text cut to 22 characters, ``""`` for the rest of the line.
        items: The items, one per row.
        cells: Returns the cells of an item.
        shown: The number of rows, None for all.
        more: The text after the number of items not shown, in the last line.

    Example:
        >>> columns = {"FLOPs": ">7", "primitive": ""}
        >>> table(columns, ["exp", "dot"], lambda name: (9, name), shown=1)
        ['  FLOPs  primitive', '      9  exp', '... and 1 more']
    """
    formats = list(columns.values())
    # A title is text, so it is formatted without the precision and type of numbers.
    titles = [re.sub(r"\.\d+\w", "", spec) for spec in formats]
    lines = [_line(columns, titles), *(_line(cells(item), formats) for item in items[:shown])]
    return lines + rest(items, shown, more)


def rest(items: Sequence[Any], shown: int | None, more: str = "more") -> list[str]:
    """Returns a line with the number of items that are not shown; no line if all are shown."""
    left = len(items) - len(items[:shown])
    return [f"... and {left} {more}"] if left else []


def _line(cells: Sequence[Any] | Mapping[str, str], formats: Sequence[str]) -> str:
    text, before = "", formats[0]
    for cell, spec in zip(cells, formats, strict=True):
        if text:  # two spaces after a right-aligned number: one is hard to see
            text += "  " if before.startswith(">") and not spec.startswith(">") else " "
        is_text = isinstance(cell, str) and spec.isdigit()
        text += format(cut(cell, int(spec)) if is_text else cell, spec)
        before = spec
    return cut(text.rstrip())
