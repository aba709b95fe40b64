"""`Comparison`: the errors of a program in mixed precision, by equation and by scope."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..export import Exported, cut, located, table
from .error_probe import COMPUTED, ArrayError, ErrorReading, worst_of
from .measured import MeasuredEquation, each_reading

# Twenty rows fit on a screen; the `Comparison` has all.
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Comparison(Exported):
    """The result of `jmp_autocast.compare`.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        rows: A row per equation with float results, the largest introduced error first.
        outputs: The errors of the float outputs, by the position of the output.
        gradients: The errors of the gradients, by the path of the argument; empty without
            ``argnums``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> comparison = compare(
        ...     loss, jnp.ones((8, 2)) / 3, jnp.ones((4, 8)), policy=BF16, argnums=0
        ... )
        >>> comparison.gradients["0"].cosine > 0.999
        True
    """

    name: str
    compute_dtype: str
    rows: tuple[ComparisonRow, ...]
    outputs: Mapping[int, ArrayError]
    gradients: Mapping[str, GradientError]

    @property
    def gradient_error(self) -> float:
        """The relative error of all gradients as one vector; 0 without ``argnums``.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
            >>> w, x = jnp.ones((8, 2)) / 3, jnp.ones((4, 8))
            >>> compare(loss, w, x, policy=BF16, argnums=0).gradient_error < 0.01
            True
        """
        return math.hypot(*(each.share for each in self.gradients.values()))

    @property
    def summary(self) -> str:
        """The comparison in one line: the worst error of an output, and that of all gradients.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> compare(jnp.matmul, jnp.eye(8), jnp.eye(8), policy=BF16).summary
            'matmul in bfloat16: outputs err by 0'
        """
        worst = worst_of(each.error for each in self.outputs.values())
        line = f"{self.name} in {self.compute_dtype}: outputs err by {worst:.2g}"
        if self.gradients:
            line += f", gradients by {self.gradient_error:.2g}"
        lost = sum(1 for row in self.rows if row.introduced_lost)
        if lost:
            line += f"; {lost} equations overflow"
        return cut(line)

    def by_scope(self, depth: int | None = None) -> dict[str, ComparisonRow]:
        """Returns for each scope, in program order, the row with the largest introduced error.

        Args:
            depth: The number of names to keep of each scope, counted from the outermost; None for
                all. 1 merges each outermost scope with the scopes inside it.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> def f(x):
            ...     with jax.named_scope("layer"), jax.named_scope("norm"):
            ...         return x / jnp.sum(x @ x)
            >>> comparison = compare(f, jnp.eye(8), policy=BF16)
            >>> list(comparison.by_scope(depth=1))
            ['layer']
        """
        found: dict[str, ComparisonRow] = {}
        for row in self.rows:  # sorted by error, so the first row of a scope has its largest error
            found.setdefault("/".join(row.scope.split("/")[:depth]), row)
        return dict(sorted(found.items(), key=lambda item: item[1].index))

    def __str__(self) -> str:
        """Returns the summary, the scopes and equations with the largest errors, and gradients."""
        lines = [self.summary, "", *_table(self.rows)]
        scopes = self.by_scope().values()
        if len(scopes) > 1:
            # A deep model has hundreds of scopes, so only the worst are shown. They are in program
            # order, which shows how errors grow.
            worst = sorted(scopes, key=lambda row: -row.introduced)[:_SHOWN]
            table_of_scopes = _table(sorted(worst, key=attrgetter("index")))
            lines += ["", "by scope: the largest introduced error of each", "", *table_of_scopes]
        if self.gradients:
            columns = {"of all": ">10.2g", "error": ">8.2g", "cosine": ">8.5f", "gradient": ""}
            cells = lambda item: (item[1].share, item[1].error, item[1].cosine, item[0])  # noqa: E731
            rows = sorted(self.gradients.items(), key=lambda item: -item[1].share)
            lines += ["", *table(columns, rows, cells, _SHOWN)]
        return "\n".join(lines)


def _table(rows: Sequence[ComparisonRow]) -> list[str]:
    # Errors have two digits: the third digit of an error on one batch is chance. The cosine has
    # five, because 0.9999 and 0.99999 are errors of 1.4 % and of 0.4 %.
    columns = {"introduced": ">10.2g", "error": ">8.2g", "cosine": ">8.5f", "largest": ">9.3g"}

    def cells(row: ComparisonRow) -> list[Any]:
        where = located(row.primitive, row.computed, row.scope, source=row.source)
        return [row.introduced, row.error, row.cosine, row.largest, where]

    return table({**columns, "equation": ""}, rows, cells, _SHOWN)


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonRow(MeasuredEquation):
    """One value of a program, in float32 and in mixed precision.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive of its producer.
        inside: The loops, branches and ``shard_map`` around it, outermost first.
        backward: Whether the equation belongs to a backward pass that JAX created.
        shapes: The shape of each float result.
        dtypes: The dtype of each float result as the program declares it.
        computed: The dtype in the mixed program, ``""`` for a dtype that autocast does not touch.
        introduced: The relative error that the equation itself introduces.
        error: The relative error of the value: the norm of the difference over the norm of the
            float32 program's value. Infinite if ``lost`` is not 0.
        cosine: The cosine of the angle between the values of both programs.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        introduced_lost: The number of elements that the equation itself makes infinite or NaN.
        largest: The largest finite magnitude in the float32 program.
        runs: How often the equation ran. Errors and cosine are those of the worst run.
        index: The position in program order.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> row = compare(jnp.matmul, jnp.eye(8), jnp.full((8, 8), 0.1), policy=BF16).rows[0]
        >>> row.primitive, row.computed, 1e-4 < row.introduced < 1e-2
        ('dot_general', 'bfloat16', True)
    """

    computed: str
    introduced: float
    error: float
    cosine: float
    lost: int
    introduced_lost: int
    largest: float
    runs: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class GradientError(ArrayError):
    """The error of the gradient of one argument.

    Args:
        error: The relative error: the norm of the difference over the norm of the float32 gradient.
        cosine: The cosine of the angle between the gradients of both programs.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        largest: The largest finite magnitude in the float32 program.
        share: The norm of the difference over the norm of all float32 gradients as one vector. A
            gradient that is 0 except for rounding, such as that of the bias of a key in attention,
            has a large error and a small share.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> loss = lambda w: 100.0 * jnp.sum(w["a"] @ w["b"])
        >>> w = {"a": jnp.full((8, 8), 0.1), "b": jnp.full((8, 8), 10.0)}
        >>> gradients = compare(loss, w, policy=BF16, argnums=0).gradients
        >>> gradients["0/a"].share < 1e-4 < gradients["0/b"].error
        True
    """

    share: float


def gradient_errors(
    measured: Mapping[str, tuple[ArrayError, tuple[float, float]]],
) -> dict[str, GradientError]:
    """Returns the errors of gradients by path.

    ``measured`` holds for each path the error, the norm of the difference, and the norm of the
    float32 gradient.
    """
    whole = math.hypot(*(norm for _, (_, norm) in measured.values()))

    def share(difference: float) -> float:
        # If all float32 gradients are 0, a difference counts as infinite, and no difference as 0.
        return difference / whole if whole else difference * math.inf if difference else 0.0

    return {
        path: GradientError(**dataclasses.asdict(error), share=share(difference))
        for path, (error, (difference, _)) in sorted(measured.items())
    }


def equation_rows(
    equations: Iterable[MeasuredEquation], readings: ErrorReading
) -> tuple[ComparisonRow, ...]:
    """Returns a row per equation; each array in ``readings`` has an element per equation."""
    rows = []
    for index, (equation, reading) in enumerate(each_reading(equations, readings)):
        numbers = reading._asdict() | {"computed": COMPUTED[reading.computed], "index": index}
        rows.append(ComparisonRow(**dataclasses.asdict(equation), **numbers))
    # Sorted by the introduced error, because most of an equation's error comes from earlier ones.
    return tuple(sorted(rows, key=lambda row: (-row.introduced, -row.error)))
