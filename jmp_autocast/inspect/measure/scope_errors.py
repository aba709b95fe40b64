"""The errors of a comparison, gathered by scope: a line per module instead of one per equation."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comparison import ComparisonRow


@dataclasses.dataclass(frozen=True, slots=True)
class ScopeError:
    """The errors of the values that are made in one scope, and of their cotangents.

    Args:
        scope: The ``jax.named_scope`` names, joined by ``/``; ``""`` outside of every scope.
        equations: The number of equations in it that make floats.
        introduced: The largest error that one of them introduces.
        error: The largest error of what they make.
        lost: How many elements they make infinite or NaN, in the mixed program alone.
        cotangents: The number of values in it whose cotangents were compared.
        cotangent_error: The mean error of these cotangents, each weighted by its largest magnitude.
        cotangent_lost: How many elements of cotangents become infinite or NaN in it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> def loss(w, x):
        ...     with jax.named_scope("dense"):
        ...         return jnp.sum(x @ w)
        >>> comparison = compare(loss, jnp.eye(3), jnp.ones((2, 3)), policy=BF16, argnums=0)
        >>> [(each.scope, each.equations, each.cotangents) for each in comparison.by_scope()]
        [('dense', 2, 2)]
    """

    scope: str
    equations: int = 0
    introduced: float = 0.0
    error: float = 0.0
    lost: int = 0
    cotangents: int = 0
    cotangent_error: float = 0.0
    cotangent_lost: int = 0


def by_scope(
    rows: Sequence[ComparisonRow], cotangents: Sequence[ComparisonRow], depth: int | None
) -> tuple[ScopeError, ...]:
    """Returns the errors of each scope, in program order.

    Args:
        rows: A row per equation.
        cotangents: A row per cotangent.
        depth: How many names of a scope count; None for all.
    """
    found: dict[str, ScopeError] = {}
    # A scope stands where its first equation does, so that a model reads from its input on.
    for row in sorted(rows, key=lambda row: row.index):
        scope = _outer(row.scope, depth)
        old = found.setdefault(scope, ScopeError(scope))
        found[scope] = dataclasses.replace(
            old,
            equations=old.equations + 1,
            introduced=max(old.introduced, row.introduced),
            error=max(old.error, row.error),
            lost=old.lost + row.introduced_lost,
        )
    made: dict[str, list[ComparisonRow]] = defaultdict(list)
    for row in cotangents:
        made[_outer(row.scope, depth)].append(row)
    for scope, group in made.items():
        found[scope] = dataclasses.replace(
            found.get(scope, ScopeError(scope)),
            cotangents=len(group),
            cotangent_error=_weighted(group),
            cotangent_lost=sum(row.introduced_lost for row in group),
        )
    return tuple(found.values())


def _weighted(group: Sequence[ComparisonRow]) -> float:
    # Weighted, because some cotangents cancel: that of a softmax's maximum is 0, and what both
    # programs have instead is rounding noise of 1e-8, with an error of 150 %.
    if any(math.isinf(row.error) for row in group):
        return math.inf
    total = sum(row.largest for row in group)
    return sum(row.error * row.largest for row in group) / total if total else 0.0


def _outer(scope: str, depth: int | None) -> str:
    return scope if depth is None else "/".join(scope.split("/")[:depth])
