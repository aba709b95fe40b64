"""Text of fixed width: numbers with units, and lines that are cut."""

from __future__ import annotations

WIDTH = 100


def cut(text: str, width: int = WIDTH) -> str:
    """Returns a line of at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def counted(count: int, one: str, many: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> counted(1, "value", "values"), counted(4096, "value", "values")
        ('1 value', '4,096 values')
    """
    return f"{count:,} {one if count == 1 else many}"
