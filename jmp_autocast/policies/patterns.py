"""Patterns of named scopes."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any


def match_depth(pattern: str, names: Sequence[str]) -> int | None:
    """Returns the length of the shortest prefix that matches, None if none does.

    Args:
        pattern: A pattern as in `Policy.with_scopes`.
        names: The enclosing scopes, outermost first.
    """
    # `tune` may ask for a thousand paths in a program of a thousand scopes.
    path = literal_path(pattern)
    if path is not None and not f"{'/'.join(names)}/".startswith(f"{path}/"):
        return None
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


def matching(rows: Iterable[tuple[Any, ...]], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Returns the rows whose patterns match a scope, the one that wins last.

    Args:
        rows: Tuples that begin with a pattern. The innermost match wins, and of equals the last.
        names: The enclosing scopes, outermost first.

    Example:
        >>> matching([("*/head", "high"), ("*", "highest"), ("*/ln", "high")], ["net", "head"])
        [('*', 'highest'), ('*/head', 'high')]
    """
    found = ((match_depth(row[0], names), row) for row in rows)
    inside = [(depth, row) for depth, row in found if depth is not None]
    return [row for _, row in sorted(inside, key=lambda match: match[0])]


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
    found = list(scopes) if patterns else []
    return tuple(p for p in patterns if all(match_depth(p, names) is None for names in found))


@functools.lru_cache(maxsize=4096)
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
