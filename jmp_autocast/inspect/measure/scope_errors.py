"""The errors of a comparison, gathered by scope: a line per module instead of one per equation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .comparison_rows import ComparisonRow


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
    groups: dict[str, tuple[list[ComparisonRow], list[ComparisonRow]]] = {}
    # A scope stands where its first equation does, so that a model reads from its input on.
    for row in sorted(rows, key=lambda row: row.index):
        groups.setdefault(_outer(row.scope, depth), ([], []))[0].append(row)
    for row in cotangents:
        groups.setdefault(_outer(row.scope, depth), ([], []))[1].append(row)
    return tuple(
        ScopeError(
            scope,
            len(made),
            max((row.introduced for row in made), default=0.0),
            max((row.error for row in made), default=0.0),
            sum(row.introduced_lost for row in made),
            len(taken),
            _weighted(taken),
            sum(row.introduced_lost for row in taken),
        )
        for scope, (made, taken) in groups.items()
    )


def _weighted(group: Sequence[ComparisonRow]) -> float:
    # Weighted, because some cotangents cancel: that of a softmax's maximum is 0, and what both
    # programs have instead is rounding noise of 1e-8, with an error of 150 %.
    if any(math.isinf(row.error) for row in group):
        return math.inf
    total = sum(row.largest for row in group)
    return sum(row.error * row.largest for row in group) / total if total else 0.0


def _outer(scope: str, depth: int | None) -> str:
    return scope if depth is None else "/".join(scope.split("/")[:depth])
