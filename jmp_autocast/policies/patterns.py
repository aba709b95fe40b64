"""Patterns of named scopes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any


def match_depth(pattern: str, names: Sequence[str]) -> int | None:
    """Returns the length of the shortest prefix that matches, None if none does.

    Args:
        pattern: A pattern as in `Policy.with_scopes`.
        names: The enclosing scopes, outermost first.
    """
    # "*" is the whole program, so that what stands in no scope is covered, too: at depth 0, below
    # every other pattern.
    if fnmatch.fnmatchcase("", pattern):
        return 0
    # The shortest prefix that matches says how deep the scope lies: deeper ones win over it.
    for depth in range(1, len(names) + 1):
        path = "/".join(names[:depth])
        # "*/LayerNorm_*" shall also match a scope at the top.
        if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase("/" + path, pattern):
            return depth
    return None


def unmatched_patterns(policy: Any, scopes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Returns the patterns of a policy that match none of several scopes: most are misspelled.

    Args:
        policy: The `Policy`.
        scopes: The scopes of a program, each by its names, outermost first.

    Example:
        >>> from jmp_autocast import BF16
        >>> policy = BF16.with_scopes({"*/ln": "float32", "*": "float16"})
        >>> unmatched_patterns(policy, [["net", "head"]])
        ('*/ln',)
    """
    # Each pattern once, in the order in which the policy names them.
    named = (*policy.scopes, *policy.scoped_rules, *policy.precisions)
    patterns = dict.fromkeys(each[0] for each in named)
    found = [tuple(names) for names in scopes] if patterns else []
    paths = {"/".join(names[:k]) for names in found for k in range(1, len(names) + 1)}

    def is_matched(pattern: str) -> bool:
        # `tune` may ask for a thousand paths in a program of a thousand scopes.
        if (path := literal_path(pattern)) is not None:
            return path in paths
        return any(match_depth(pattern, names) is not None for names in found)

    return tuple(pattern for pattern in patterns if not is_matched(pattern))


def literal_path(pattern: str) -> str | None:
    """Returns the one path that a pattern stands for, None if it may match others.

    Args:
        pattern: A pattern as in `Policy.with_scopes`.

    Example:
        >>> literal_path("net/head"), literal_path("net[[]0]"), literal_path("*/head")
        ('net/head', 'net[0]', None)
    """
    if pattern.startswith("/") or any(c in "*?[" for c in _ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)


_ESCAPED = re.compile(r"\[([*?[])\]")  # what `glob.escape` writes


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
