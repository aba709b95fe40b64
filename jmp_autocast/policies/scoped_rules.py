"""The rules of scopes: found by the path that an equation is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from .cast_policy import Rule
from .patterns import literal_path, match_depth

ByPath: TypeAlias = Mapping[str | None, Sequence[tuple[int, str, str, Rule]]]
"""Rules with their positions, patterns and primitives, by the one path that a pattern stands for;
those of other patterns are at None."""


def by_path(scoped_rules: Iterable[tuple[str, str, Rule]]) -> ByPath:
    """Returns the scoped rules of a policy by the one path that their patterns stand for.

    What `tune` tries first may be a rule for each scope of a large program: a thousand rules would
    be compared with a thousand scopes.

    Args:
        scoped_rules: Those of a policy.

    Example:
        >>> from jmp_autocast import CastPolicy
        >>> rules = [("net/head", "tanh", CastPolicy.FP32), ("*/ln", "tanh", CastPolicy.FP32)]
        >>> list(by_path(rules))
        ['net/head', None]
    """
    found: dict[str | None, list[tuple[int, str, str, Rule]]] = {}
    for i, (pattern, name, rule) in enumerate(scoped_rules):
        found.setdefault(literal_path(pattern), []).append((i, pattern, name, rule))
    return found


def rules_at(rules: ByPath, names: Sequence[str]) -> tuple[tuple[str, Rule], ...]:
    """Returns the rules that hold in a scope, as pairs of primitive and rule.

    Args:
        rules: Those of a policy.
        names: The enclosing scopes, outermost first.

    Example:
        >>> from jmp_autocast import CastPolicy
        >>> rules_at(by_path([("*/ln", "tanh", CastPolicy.FP32)]), ["net", "ln"])
        (('tanh', <CastPolicy.FP32: 'fp32'>),)
    """
    matches: list[tuple[int, int, str, Rule]] = []
    for depth in range(1, len(names) + 1):
        for i, _, name, rule in rules.get("/".join(names[:depth]), ()):
            matches.append((depth, i, name, rule))
    for i, pattern, name, rule in rules.get(None, ()):
        if (depth := match_depth(pattern, names)) is not None:
            matches.append((depth, i, name, rule))
    # The innermost wins, and of equals the last.
    matches.sort(key=lambda match: match[:2])
    return tuple({name: rule for _, _, name, rule in matches}.items())
