"""Patterns of named scopes."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any


def match_depth(pattern: str, names: Sequence[str]) -> int | None:
    """Returns the length of the shortest prefix that matches, None if none does.

    Args:
        pattern: A pattern as in `Policy.with_scopes`.
        names: The enclosing scopes, outermost first.
    """
    for depth in range(1, len(names) + 1):
        path = "/".join(names[:depth])
        # "*/LayerNorm_*" shall also match a scope at the top.
        if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase("/" + path, pattern):
            return depth
    return None


def check_pattern(value: Any) -> str:
    """Returns a scope pattern.

    Raises:
        TypeError: It is no string, or empty.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(
            f"A scope pattern must be a string, got {value!r}. Write one such as '*/LayerNorm_*'."
        )
    return value
