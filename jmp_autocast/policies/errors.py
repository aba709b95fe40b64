"""Texts that error messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_WIDTH = 80  # characters of a value in a message


def wrong_type(expected: str, value: Any, fix: str = "") -> TypeError:
    """Returns the error for a value of a wrong type.

    Args:
        expected: What must be given.
        value: What was given. A long text is cut: in a terminal, that of a parameter tree would
            push the start of the message away.
        fix: What to write instead.

    Example:
        >>> wrong_type("params must be a position", "w", "Write params=0.")
        TypeError("params must be a position, got 'w' of type str. Write params=0.")
    """
    text = repr(value)
    text = text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
    return TypeError(f"{expected}, got {text} of type {type(value).__name__}. {fix}".rstrip())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that names the nearest match, or nothing."""
    # At 0.5 half of the letters agree: "compte" finds "compute", and "qqqq" finds nothing.
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
