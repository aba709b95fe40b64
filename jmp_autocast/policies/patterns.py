"""Patterns of named scopes."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence
from typing import Any


def match_depth(pattern: str, names: Sequence[str]) -> int | None:
    """Returns the length of the shortest prefix that matches, None if none does.

    Args:
        pattern: A pattern as in `Policy.with_rules`.
        names: The enclosing scopes, outermost first.
    """
    # A shortcut: `tune` may match a thousand paths with a thousand scopes.
    path = literal_path(pattern)
    if path is not None and not f"{'/'.join(names)}/".startswith(f"{path}/"):
        return None
    # "*" also covers equations in no scope: at depth 0, below every other pattern.
    if fnmatch.fnmatchcase("", pattern):
        return 0
    # The depth of the scope is the length of the shortest prefix that matches.
    for depth in range(1, len(names) + 1):
        path = "/".join(names[:depth])
        # "*/LayerNorm_*" shall also match a scope at the top.
        if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase("/" + path, pattern):
            return depth
    return None


@functools.lru_cache(maxsize=4096)
def literal_path(pattern: str) -> str | None:
    """Returns the only path that a pattern matches, None if it may match several.

    Example:
        >>> literal_path("net/head"), literal_path("net[[]0]"), literal_path("*/head")
        ('net/head', 'net[0]', None)
    """
    if pattern.startswith("/") or any(c in "*?[" for c in _ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)


_ESCAPED = re.compile(r"\[([*?[])\]")  # as `glob.escape` writes them


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
