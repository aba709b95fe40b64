"""What reports are written as: lines of 100 columns, tables, plain data, JSON and files.

All reports and the log of `tune` write through this file. So there is one way to write an infinity:
``"inf"``.
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

WIDTH = 100

NOT_EXPORTED = {"exported": False}
"""The metadata of a field that has no plain form, or a better one."""

Item = TypeVar("Item")


class Exported:
    """A dataclass that can be written as plain data and as JSON.

    Written are its fields, without those whose metadata says ``NOT_EXPORTED``, and the properties
    that ``_computed`` names.
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

        Args:
            path: A file to write it to as well.

        Example:
            >>> import json
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> text = explain(jnp.exp, jnp.ones(4), policy=BF16).to_json()
            >>> json.loads(text)["compute_dtype"]
            'bfloat16'
        """
        return saved(json_text(self), path)


def plain(value: Any, *, finite: bool = False) -> Any:
    """Returns dataclasses as dicts and tuples as lists, at any depth.

    Args:
        value: A dataclass, mapping, sequence, string or number.
        finite: Write numbers that JSON does not know as strings: ``"inf"``, ``"nan"``, and ``"b"``
            for a symbolic length.
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        names = [field.name for field in fields if field.metadata.get("exported", True)]
        # `dataclasses.asdict` knows no computed fields, and would copy those that are not written.
        names += getattr(value, "_computed", ())
        return {name: plain(getattr(value, name), finite=finite) for name in names}
    if isinstance(value, Mapping):
        return {key: plain(x, finite=finite) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x, finite=finite) for x in value]
    if isinstance(value, float):
        return str(value) if finite and not math.isfinite(value) else value
    return str(value) if finite and is_symbolic_dim(value) else value


def json_text(value: Any) -> str:
    """Returns a value as JSON that every reader takes.

    Python would write ``Infinity``, which JSON has not and JavaScript, R and jq refuse; ``float``
    reads the string ``"inf"`` back.

    Args:
        value: As for `plain`.
    """
    return json.dumps(plain(value, finite=True), allow_nan=False)


def saved(text: str, path: str | pathlib.Path | None) -> str:
    """Writes a text to a file, if there is a path, and returns it.

    Args:
        text: The text.
        path: The file, None for none.
    """
    if path is not None:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    return text


# --- text -----------------------------------------------------------------------------------


def cut(text: str, width: int = WIDTH) -> str:
    """Returns a line of at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def place(*words: str, source: str) -> str:
    """Returns what stands where, with the file of the source without its folders.

    Args:
        words: A primitive, its dtype, its scope; empty ones are left out.
        source: The source line. Those of installed packages are longer than a line of text.

    Example:
        >>> place("dot_general", "", "mlp", source="/lib/python3.13/flax/linear.py:8:4 (f)")
        'dot_general mlp linear.py:8:4 (f)'
    """
    return " ".join(filter(None, (*words, re.sub(r"^.*[\\/](?=.*:\d)", "", source))))


def scaled(value: float) -> str:
    """Returns a number with three digits and the letter of its power of 1,000.

    Example:
        >>> scaled(512), scaled(1.5e9)
        ('512 ', '1.5 G')
    """
    # Three digits: the FLOPs of a program are an estimate, and more digits would hide that.
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or unit == "P":
            break
        value /= 1000
    return f"{value:.3g}{unit and ' ' + unit}" if unit else f"{value:.0f} "


def timed(seconds: float | None) -> str:
    """Returns a time with the prefix that suits its size; ``"-"`` for one that is not known.

    Example:
        >>> timed(0.0123), timed(4e-6), timed(None)
        ('12.3 ms', '4 us', '-')
    """
    if seconds is None:
        return "-"
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    unit, size = next((pair for pair in units if seconds >= pair[1]), units[-1])
    return f"{seconds / size:.3g} {unit}"


def counted(count: int, one: str, many: str = "") -> str:
    """Returns a number with its noun.

    Args:
        count: The number.
        one: The noun of one.
        many: The noun of several; "" for ``one`` with an "s".

    Example:
        >>> counted(1, "value"), counted(4096, "value")
        ('1 value', '4,096 values')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def labeled(facts: Mapping[str, str | None]) -> list[str]:
    """Returns a line for each fact, with its name in front; None leaves a fact out.

    Args:
        facts: Texts by name.

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
        columns: The titles, each with the format of its cells: ``">10.2g"`` for numbers on the
            right, ``"22"`` for text that is cut to that width, ``""`` for the rest of the line.
        items: What has a row.
        cells: Returns the cells of an item.
        shown: How many items have a row, None for all.
        more: What the last line says of the others, after their number.

    Example:
        >>> columns = {"FLOPs": ">7", "primitive": ""}
        >>> table(columns, ["exp", "dot"], lambda name: (9, name), shown=1)
        ['  FLOPs  primitive', '      9  exp', '... and 1 more']
    """
    formats = list(columns.values())
    titles = [re.sub(r"\.\d+\w", "", spec) for spec in formats]  # no digits after a point in text
    lines = [_line(columns, titles), *(_line(cells(item), formats) for item in items[:shown])]
    return lines + rest(items, shown, more)


def rest(items: Sequence[Any], shown: int | None, more: str = "more") -> list[str]:
    """Returns the line that says how many items are not shown, none where all are."""
    left = len(items) - len(items[:shown])
    return [f"... and {left} {more}"] if left else []


def _line(cells: Sequence[Any] | Mapping[str, str], formats: Sequence[str]) -> str:
    text, before = "", formats[0]
    for cell, spec in zip(cells, formats, strict=True):
        if text:  # numbers stand at the right of their column: text after them needs more room
            text += "  " if before.startswith(">") and not spec.startswith(">") else " "
        is_text = isinstance(cell, str) and spec.isdigit()
        text += format(cut(cell, int(spec)) if is_text else cell, spec)
        before = spec
    return cut(text.rstrip())
