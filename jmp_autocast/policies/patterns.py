"""Patterns that match named scopes."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence
from typing import Any


def match_depth(pattern: str, names: Sequence[str]) -> int | None:
    """Returns the length of the shortest prefix of ``names`` that matches; None if none does.

    Args:
        pattern: A pattern as in `Policy.with_rules`.
        names: The enclosing scopes, outermost first.
    """
    # A fast path for literal patterns: `tune` may match a thousand patterns against a thousand
    # scopes.
    path = literal_path(pattern)
    if path is not None and not f"{'/'.join(names)}/".startswith(f"{path}/"):
        return None
    # "*" also matches equations in no scope. Its depth is 0, so that every other match is deeper
    # and wins.
    if fnmatch.fnmatchcase("", pattern):
        return 0
    for depth in range(1, len(names) + 1):
        path = "/".join(names[:depth])
        # With a "/" in front, "*/LayerNorm_*" also matches an outermost scope.
        if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase("/" + path, pattern):
            return depth
    return None


@functools.lru_cache(maxsize=4096)
def literal_path(pattern: str) -> str | None:
    """Returns the path that a pattern without wildcards matches; None for any other pattern.

    Example:
        >>> literal_path("net/head"), literal_path("net[[]0]"), literal_path("*/head")
        ('net/head', 'net[0]', None)
    """
    if pattern.startswith("/") or any(c in "*?[" for c in _ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)


_ESCAPED = re.compile(r"\[([*?[])\]")  # a wildcard that `glob.escape` has escaped


def check_pattern(value: Any) -> str:
    """Returns a scope pattern after a check of its type.

    Raises:
        TypeError: ``value`` is no string, or is empty.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(
            f"A scope pattern must be a string, got {value!r}. Write one such as '*/LayerNorm_*'."
        )
    return value
