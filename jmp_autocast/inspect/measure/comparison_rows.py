"""The rows of a `Comparison`: the error of each equation, cotangent, output and gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from .cotangents import Tap
from .error_probe import COMPUTED, Distance, ErrorReading, Norms
from .measured import MeasuredEquation, each_reading, fields_of


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
        index: The position in program order, of the equation or of the value.

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
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayError:
    """The error of an output.

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


@dataclasses.dataclass(frozen=True, slots=True)
class GradientError(ArrayError):
    """The error of the gradient of one argument.

    Args:
        error: The relative error: the norm of the difference over the norm of the float32 gradient.
        cosine: The cosine of the angle between the two.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        largest: The largest finite magnitude in the float32 program.
        share: The norm of the difference over the norm of all float32 gradients together: what this
            one adds to the error of the step. A gradient that is 0 but for rounding, as that of the
            bias of a key in attention, has a large error and a small share.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> loss = lambda w: 100.0 * jnp.sum(w["a"] @ w["b"])
        >>> w = {"a": jnp.full((2, 2), 0.1), "b": jnp.full((2, 2), 10.0)}
        >>> gradients = compare(loss, w, policy=BF16, argnums=0).gradients
        >>> gradients["0/a"].share < 1e-4 < gradients["0/b"].error
        True
    """

    share: float


def gradient_errors(measured: Mapping[str, tuple[Distance, Norms]]) -> dict[str, GradientError]:
    """Returns the errors of gradients, by the path of the argument.

    Args:
        measured: What was measured of each.
    """
    whole = math.hypot(*(norms.reference for _, norms in measured.values()))

    def share(difference: float) -> float:
        # Relative to zero any difference is infinite, and no difference is none.
        return difference / whole if whole else math.inf if difference else 0.0

    return {
        path: GradientError(*distance, share=share(norms.difference))
        for path, (distance, norms) in sorted(measured.items())
    }


def equation_rows(
    equations: Iterable[MeasuredEquation], readings: ErrorReading
) -> tuple[ComparisonRow, ...]:
    """Returns a row per equation.

    Args:
        equations: The equations.
        readings: What was measured of each, as arrays with an element per equation.
    """
    rows = []
    for index, (equation, reading) in enumerate(each_reading(equations, readings)):
        numbers = reading._asdict() | {"computed": COMPUTED[reading.computed], "index": index}
        rows.append(ComparisonRow(**fields_of(equation), **numbers))
    return _ranked(rows)


def cotangent_rows(taps: Sequence[Tap], distances: Sequence[Distance]) -> tuple[ComparisonRow, ...]:
    """Returns a row per cotangent, which is computed from the cotangents of its value's readers.

    Args:
        taps: The values whose cotangents were taken.
        distances: What was measured of each cotangent.
    """
    carried = [0.0] * len(taps)
    for tap, distance in zip(taps, distances, strict=True):
        for source in tap.sources:
            carried[source] = max(carried[source], distance.error)
    rows = []
    measured = enumerate(zip(taps, distances, carried, strict=True))
    for index, (tap, distance, before) in measured:
        error = distance.error
        # Errors that have nothing to do with each other add up like the sides of a right angle:
        # what is added is sqrt(error**2 - before**2), here without squares that could overflow.
        added = math.sqrt((error - before) * (error + before)) if error > before else 0.0
        # Where a cotangent before it is lost already, this equation is not the one that lost it.
        lost = 0 if math.isinf(before) else distance.lost
        numbers = distance._asdict() | {"introduced": added, "introduced_lost": lost}
        fields = fields_of(tap.equation) | {"computed": "", "runs": 1, "worst_run": 0}
        rows.append(ComparisonRow(**fields, **numbers, index=index))
    return _ranked(rows)


def _ranked(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    # By what a row introduces: its error is mostly that of the rows before it.
    return tuple(sorted(rows, key=lambda row: (-row.introduced, -row.error)))
