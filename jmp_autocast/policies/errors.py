"""Texts that error messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def wrong_type(expected: str, value: Any, fix: str = "") -> TypeError:
    """Returns the error for a value of a wrong type.

    Args:
        expected: What must be given.
        value: What was given.
        fix: What to write instead.

    Example:
        >>> wrong_type("params must be a position", "w", "Write params=0.")
        TypeError("params must be a position, got 'w' of type str. Write params=0.")
    """
    return TypeError(f"{expected}, got {value!r} of type {type(value).__name__}. {fix}".rstrip())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that names the nearest match, or nothing."""
    # At 0.5 half of the letters agree: "compte" finds "compute", and "qqqq" finds nothing.
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
