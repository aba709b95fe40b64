"""Text of fixed width: numbers with units, and lines that are cut."""

from __future__ import annotations

WIDTH = 100


def cut(text: str, width: int = WIDTH) -> str:
    """Returns a line of at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def scaled(value: float) -> str:
    """Returns a number with three digits and the letter of its power of 1,000.

    Example:
        >>> scaled(512), scaled(1.5e9)
        ('512 ', '1.5 G')
    """
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or unit == "P":
            break
        value /= 1000
    return f"{value:.3g}{unit and ' ' + unit}" if unit else f"{value:.0f} "


def counted(count: int, one: str, many: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> counted(1, "value", "values"), counted(4096, "value", "values")
        ('1 value', '4,096 values')
    """
    return f"{count:,} {one if count == 1 else many}"
