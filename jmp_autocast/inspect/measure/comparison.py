"""`Comparison`: where a program in mixed precision departs from the float32 one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..export import Exported, cut, table
from .cotangents import Tap
from .error_probe import COMPUTED, Distance, ErrorReading
from .measured import MeasuredEquation, fields_of

_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonRow(MeasuredEquation):
    """One value of a program, in float32 and in mixed precision.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive that makes it.
        inside: The loops, branches and device maps around it, outermost first.
        backward: It belongs to a backward pass that JAX made; true of a cotangent.
        shapes: The shape of each float result.
        dtypes: The dtype of each float result as the program declares it.
        computed: The dtype in the mixed program, ``""`` for one that autocast does not touch.
        introduced: The relative error that the equation itself makes. For a cotangent, what is
            added to the error of the cotangents that it is computed from.
        error: The relative error of the value: the norm of the difference over the norm of the
            float32 program's value. Infinite where ``lost`` is not 0.
        cosine: The cosine of the angle between the two values.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        introduced_lost: The number of those that the equation itself makes so.
        largest: The largest finite magnitude in the float32 program.
        runs: How often the equation ran. Errors and cosine are those of the worst run.
        worst_run: The run with the largest introduced error, counted from 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> row = compare(jnp.matmul, jnp.eye(2), jnp.full((2, 2), 0.1), policy=BF16).rows[0]
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
    worst_run: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayError:
    """The error of an output or a gradient.

    Args:
        error: The relative error: the norm of the difference over the norm of the float32 value.
        cosine: The cosine of the angle between the two.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        largest: The largest finite magnitude in the float32 program.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import FP16, compare
        >>> output = compare(jnp.matmul, jnp.eye(2), jnp.full((2, 2), 7e4), policy=FP16).outputs[0]
        >>> output.error, output.lost, output.largest
        (inf, 4, 70000.0)
    """

    error: float
    cosine: float
    lost: int
    largest: float


@dataclasses.dataclass(frozen=True)
class Comparison(Exported):
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
    gradients: Mapping[str, ArrayError]

    @property
    def summary(self) -> str:
        """The comparison in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> compare(jnp.matmul, jnp.eye(2), jnp.eye(2), policy=BF16).summary
            'matmul in bfloat16: outputs err by 0'
        """
        worst = max((each.error for each in self.outputs.values()), default=0.0)
        line = f"{self.name} in {self.compute_dtype}: outputs err by {worst:.2g}"
        if self.gradients:
            gradient = max(each.error for each in self.gradients.values())
            line += f", gradients by {gradient:.2g}"
        lost = sum(1 for row in self.rows if row.introduced_lost)
        if lost:
            line += f"; {lost} equations overflow"
        return cut(line)

    def __str__(self) -> str:
        """Returns the summary, and the equations that introduce the largest errors."""
        lines = [self.summary, "", *_table(self.rows)]
        if self.gradients:
            lines += ["", "cotangents, by what is added to the error of those before", ""]
            lines += _table(self.cotangents)
            columns = {"error": ">10.2g", "cosine": ">8.5f", "gradient": ""}
            ordered = sorted(self.gradients.items(), key=lambda item: -item[1].error)
            cells = lambda item: (item[1].error, item[1].cosine, item[0])  # noqa: E731
            lines += ["", *table(columns, ordered, cells, _SHOWN)]
        return "\n".join(lines)


def comparison_of(
    *,
    name: str,
    compute_dtype: str,
    equations: Sequence[MeasuredEquation],
    readings: ErrorReading,
    outputs: Sequence[Distance | None],
    taps: Sequence[Tap],
    cotangents: Sequence[Distance],
    gradients: Mapping[str, Distance],
) -> Comparison:
    """Returns the comparison that measurements make.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        equations: The equations.
        readings: What was measured of each, as arrays with an element per equation.
        outputs: What was measured of each output, None for what is no float.
        taps: The values whose cotangents were taken.
        cotangents: What was measured of each.
        gradients: What was measured of each gradient, by the path of the argument.
    """
    rows = [_row(equation, readings, i) for i, equation in enumerate(equations)]
    return Comparison(
        name=name,
        compute_dtype=compute_dtype,
        rows=_ranked(rows),
        outputs={i: ArrayError(**_numbers(d)) for i, d in enumerate(outputs) if d is not None},
        cotangents=_ranked(_cotangent_rows(taps, cotangents)),
        gradients={path: ArrayError(**_numbers(d)) for path, d in gradients.items()},
    )


def _ranked(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.introduced, -row.error)))


def _numbers(distance: Distance) -> dict[str, Any]:
    numbers = {name: float(x) for name, x in distance._asdict().items()}
    return numbers | {"lost": int(distance.lost)}


def _row(equation: MeasuredEquation, readings: ErrorReading, i: int) -> ComparisonRow:
    reading = jax.tree.map(lambda x: x[i], readings)
    return ComparisonRow(
        **fields_of(equation),
        **_numbers(reading.distance),
        computed=COMPUTED[int(reading.computed)],
        introduced=float(reading.introduced),
        introduced_lost=int(reading.introduced_lost),
        runs=int(reading.runs),
        worst_run=int(reading.worst_run),
    )


def _cotangent_rows(taps: Sequence[Tap], cotangents: Sequence[Distance]) -> list[ComparisonRow]:
    """A cotangent is computed from those of its value's readers."""
    carried = [0.0] * len(taps)
    for tap, distance in zip(taps, cotangents, strict=True):
        for source in tap.sources:
            carried[source] = max(carried[source], float(distance.error))
    rows = []
    for tap, distance, before in zip(taps, cotangents, carried, strict=True):
        error = float(distance.error)
        # Errors that have nothing to do with each other add up like the sides of a right angle:
        # what is added is sqrt(error**2 - before**2), here without squares that could overflow.
        added = math.sqrt((error - before) * (error + before)) if error > before else 0.0
        rows.append(
            ComparisonRow(
                **fields_of(tap.equation),
                **_numbers(distance),
                computed="",
                introduced=added,
                introduced_lost=0 if math.isinf(before) else int(distance.lost),
                runs=1,
                worst_run=0,
            )
        )
    return rows


def _table(rows: Sequence[ComparisonRow]) -> list[str]:
    columns = {"introduced": ">10.2g", "error": ">8.2g", "cosine": ">8.5f", "largest": ">9.3g"}

    def cells(row: ComparisonRow) -> list[Any]:
        where = " ".join(filter(None, (row.primitive, row.computed, row.scope, row.source)))
        return [row.introduced, row.error, row.cosine, row.largest, where]

    return table({**columns, "equation": ""}, rows, cells, _SHOWN)
