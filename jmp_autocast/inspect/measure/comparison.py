"""`Comparison`: where a program in mixed precision departs from the float32 one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..export import cut, table
from ..page.page import Page, Paged, section, tables_page
from .comparison_rows import ArrayError, ComparisonRow, GradientError
from .scope_errors import ScopeError, by_scope

# Twenty rows fit on a screen. The comparison holds all.
_SHOWN = 20
# Equations beyond the worst 200 introduce nothing that a reader would look at; JSON has all.
_ON_PAGE = 200

_OF_ROWS = "primitive, dtypes, computed, introduced, error, cosine, scope, source"


@dataclasses.dataclass(frozen=True)
class Comparison(Paged):
    """What `jmp_autocast.compare` returns.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        rows: A row per equation that makes floats, the largest introduced error first.
        outputs: The errors of the float outputs, by their position.
        cotangents: A row per value of the forward pass, for the cotangent that the backward pass
            gives it, the largest introduced error first; empty without ``argnums``. What is inside
            loops and branches has none.
        gradients: The errors of the gradients, by the path of the argument.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> comparison = compare(
        ...     loss, jnp.ones((3, 2)) / 3, jnp.ones((4, 3)), policy=BF16, argnums=0
        ... )
        >>> comparison.gradients["0"].cosine > 0.999
        True
    """

    name: str
    compute_dtype: str
    rows: tuple[ComparisonRow, ...]
    outputs: Mapping[int, ArrayError]
    cotangents: tuple[ComparisonRow, ...]
    gradients: Mapping[str, GradientError]

    @property
    def gradient_error(self) -> float:
        """The relative error of all gradients together, as of one vector; 0 without ``argnums``.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
            >>> w, x = jnp.ones((3, 2)) / 3, jnp.ones((4, 3))
            >>> compare(loss, w, x, policy=BF16, argnums=0).gradient_error < 0.01
            True
        """
        return math.hypot(*(each.share for each in self.gradients.values()))

    @property
    def summary(self) -> str:
        """The comparison in one line: the worst output, and all gradients together.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> compare(jnp.matmul, jnp.eye(2), jnp.eye(2), policy=BF16).summary
            'matmul in bfloat16: outputs err by 0'
        """
        worst = max((each.error for each in self.outputs.values()), default=0.0)
        line = f"{self.name} in {self.compute_dtype}: outputs err by {worst:.2g}"
        if self.gradients:
            line += f", gradients by {self.gradient_error:.2g}"
        lost = sum(1 for row in self.rows if row.introduced_lost)
        if lost:
            line += f"; {lost} equations overflow"
        return cut(line)

    def by_scope(self, depth: int | None = None) -> tuple[ScopeError, ...]:
        """Returns the errors of each scope, forward and backward, in program order.

        Args:
            depth: How many names of a scope count: 1 for the parts of the outermost module. None
                for all.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> def f(x):
            ...     with jax.named_scope("layer"), jax.named_scope("norm"):
            ...         return x / jnp.sum(x @ x)
            >>> comparison = compare(f, jnp.eye(3), policy=BF16)
            >>> [each.scope for each in comparison.by_scope(depth=1)]
            ['layer']
        """
        return by_scope(self.rows, self.cotangents, depth)

    def by_share(self) -> list[tuple[str, GradientError]]:
        """Returns the gradients with their paths, those first that add most to the error of all.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
            >>> w, x = jnp.ones((3, 2)) / 3, jnp.ones((4, 3))
            >>> [path for path, _ in compare(loss, w, x, policy=BF16, argnums=0).by_share()]
            ['0']
        """
        return sorted(self.gradients.items(), key=lambda item: (-item[1].share, -item[1].error))

    def _page(self) -> Page:
        """Returns the page: the errors by scope, by equation, of cotangents, of gradients."""
        of_scopes = "scope, introduced, error, lost"
        of_cotangents = ", error of cotangents, cotangents lost" if self.gradients else ""
        gradients = [
            (path, each.share, each.error, each.cosine, each.lost) for path, each in self.by_share()
        ]
        by_error = "the largest introduced error first"
        return tables_page(
            "Comparison with float32",
            f"{self.name} in {self.compute_dtype}",
            self.summary,
            [
                section("By scope, in program order", of_scopes + of_cotangents, self.by_scope()),
                section(f"Equations, {by_error}", _OF_ROWS, self.rows[:_ON_PAGE]),
                section(f"Cotangents, {by_error}", _OF_ROWS, self.cotangents[:_ON_PAGE]),
                section("Gradients", "argument, of all, error, cosine, lost", gradients),
            ],
        )

    def __str__(self) -> str:
        """Returns the summary, the scopes and equations with the largest errors, and gradients."""
        lines = [self.summary, "", *_table(self.rows)]
        scopes = self.by_scope()
        if len(scopes) > 1:
            lines += [
                "",
                "by scope: the largest errors of values, and the mean one of cotangents",
                "",
            ]
            lines += _scope_table(scopes)
        if self.gradients:
            lines += ["", "cotangents, by what is added to the error of those before", ""]
            lines += _table(self.cotangents)
            columns = {"of all": ">10.2g", "error": ">8.2g", "cosine": ">8.5f", "gradient": ""}
            cells = lambda item: (item[1].share, item[1].error, item[1].cosine, item[0])  # noqa: E731
            lines += ["", *table(columns, self.by_share(), cells, _SHOWN)]
        return "\n".join(lines)


def _scope_table(scopes: Sequence[ScopeError]) -> list[str]:
    columns = {"introduced": ">10.2g", "error": ">8.2g"}
    columns |= {"of cotangents": ">13.2g", "scope": ""}
    # The worst ones alone, in either direction: a deep model has hundreds of scopes. What is shown
    # stands in program order, so that one sees an error grow from layer to layer.
    worst = sorted(scopes, key=lambda each: -max(each.introduced, each.cotangent_error))
    shown = {each.scope for each in worst[:_SHOWN]}
    ordered = [each for each in scopes if each.scope in shown] + worst[_SHOWN:]

    def cells(each: ScopeError) -> list[Any]:
        return [each.introduced, each.error, each.cotangent_error, each.scope or "(no scope)"]

    return table(columns, ordered, cells, _SHOWN, "more; by_scope() has all")


def _table(rows: Sequence[ComparisonRow]) -> list[str]:
    # Two digits: an error is that of one run on one batch, and its third digit is chance. The
    # cosine has five, because 0.9999 and 0.99999 are errors of 1.4 % and of 0.4 %.
    columns = {"introduced": ">10.2g", "error": ">8.2g", "cosine": ">8.5f", "largest": ">9.3g"}

    def cells(row: ComparisonRow) -> list[Any]:
        where = " ".join(filter(None, (row.primitive, row.computed, row.scope, row.source)))
        return [row.introduced, row.error, row.cosine, row.largest, where]

    return table({**columns, "equation": ""}, rows, cells, _SHOWN)
