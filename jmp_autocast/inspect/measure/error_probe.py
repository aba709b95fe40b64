"""How far a program in mixed precision is from the float32 one, equation by equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .basic_blocks import EquationRun, Probe
from .materialize import materialized
from .measured import is_measurable

# Codes of the dtypes that a result may have in the mixed program; 0 is any other.
COMPUTED = ("", "float32", "float16", "bfloat16")

_EXACT = np.float32(0)
_SAME = np.float32(1)


class Distance(NamedTuple):
    """How far an array is from its reference.

    Args:
        error: The norm of the difference, relative to the norm of the reference.
        cosine: The cosine of the angle between them.
        lost: The number of elements that are finite in the reference alone.
        largest: The largest finite magnitude in the reference.
    """

    error: Any
    cosine: Any
    lost: Any
    largest: Any


class ErrorReading(NamedTuple):
    """The errors of equations, each in its worst run.

    Args:
        distance: How far the result is from the float32 program's.
        introduced: The error that the equation alone makes: it runs on the float32 program's
            operands, rounded to the dtypes that it reads.
        introduced_lost: The number of elements that it alone makes infinite or NaN.
        runs: How often it ran.
        worst_run: The run with the largest introduced error, counted from 0.
        computed: The dtype in the mixed program, as a position in `COMPUTED`.
    """

    distance: Distance
    introduced: Any
    introduced_lost: Any
    runs: Any
    worst_run: Any
    computed: Any


class ErrorProbe(Probe):
    """Compares program 1, the mixed program, with program 0, the program as it was traced."""

    def measure(self, run: EquationRun) -> tuple[Any, ...]:
        """Returns the sums from which the errors of an equation follow."""
        declared, mixed = run.operands
        alone = [materialized(x) for x in run.again(1, list(map(_as_read, declared, mixed)))]
        measured = [
            (_sums(reference, result), _sums(reference, own), _code(result))
            for reference, result, own in zip(*run.results, alone, strict=True)
            if is_measurable(jax.typeof(reference))
        ]
        # Of several results the first is shown, with the largest error of all.
        (*sums, largest), (*own, _), code = measured[0]
        for (*more, _), (*more_own, _), _ in measured[1:]:
            worse = _error(more) > _error(sums)
            sums = [jnp.where(worse, b, a) for a, b in zip(sums, more, strict=True)]
            worse = _error(more_own) > _error(own)
            own = [jnp.where(worse, b, a) for a, b in zip(own, more_own, strict=True)]
        return (*sums, largest, *own, code)

    def settle(self, measured: tuple[Any, ...], held: tuple[Any, ...], ticks: Any) -> ErrorReading:
        """Returns the readings of equations that have each run once."""
        sums, largest, own, code = measured[:5], measured[5], measured[6:11], measured[11]
        return ErrorReading(
            distance=_distance(sums, largest),
            introduced=_error(own),
            introduced_lost=own[-1],
            runs=jnp.ones_like(ticks),
            worst_run=jnp.zeros_like(ticks),
            computed=code,
        )

    def nothing(self, count: int) -> ErrorReading:
        """Returns the readings of equations that have not run."""
        zeros, exact = jnp.zeros(count, jnp.uint32), jnp.full(count, _EXACT)
        return ErrorReading(
            distance=Distance(exact, jnp.full(count, _SAME), zeros, exact),
            introduced=exact,
            introduced_lost=zeros,
            runs=zeros,
            worst_run=zeros,
            computed=zeros,
        )

    def merge(self, first: ErrorReading, second: ErrorReading) -> ErrorReading:
        """Returns the readings of two runs of the same equations, ``first`` the earlier."""
        worse = second.introduced > first.introduced
        a, b = first.distance, second.distance
        return ErrorReading(
            distance=Distance(
                error=jnp.maximum(a.error, b.error),
                cosine=jnp.minimum(a.cosine, b.cosine),
                lost=a.lost + b.lost,
                largest=jnp.maximum(a.largest, b.largest),
            ),
            introduced=jnp.maximum(first.introduced, second.introduced),
            introduced_lost=first.introduced_lost + second.introduced_lost,
            runs=first.runs + second.runs,
            worst_run=jnp.where(worse, first.runs + second.worst_run, first.worst_run),
            computed=jnp.maximum(first.computed, second.computed),
        )


def distance(reference: Any, result: Any) -> Distance:
    """Returns how far an array is from its reference.

    Args:
        reference: An array of floats or complex numbers.
        result: An array of the same shape.
    """
    *sums, largest = _sums(reference, result)
    return _distance(sums, largest)


def _distance(sums: Sequence[Any], largest: Any) -> Distance:
    square, other, product, _, lost = sums
    length = jnp.sqrt(square) * jnp.sqrt(other)
    cosine = jnp.where(length > 0, product / jnp.where(length > 0, length, 1.0), 1.0)
    return Distance(_error(sums), jnp.clip(cosine, -1.0, 1.0), lost, largest)


def _error(sums: Sequence[Any]) -> Any:
    """An element that became infinite is an infinite error."""
    square, _, _, difference, lost = sums
    some = square > 0
    relative = jnp.sqrt(difference / jnp.where(some, square, 1.0))
    of_zero = jnp.where(difference > 0, jnp.inf, 0.0)
    return jnp.where(lost > 0, jnp.inf, jnp.where(some, relative, of_zero)).astype(jnp.float32)


@jax.jit
def _sums(reference: Any, result: Any) -> tuple[Any, ...]:
    """Squares, products, squared differences, lost elements, and the largest magnitude."""
    a, b = _as_float32(reference), _as_float32(result)
    known, lost = jnp.isfinite(a), jnp.isfinite(a) & ~jnp.isfinite(b)
    largest = jnp.max(jnp.where(known, jnp.abs(a), 0.0))
    both = known & ~lost
    scale = jnp.where(largest > 0, largest, 1.0)
    # Scaled, so that no square overflows or vanishes.
    a, b = jnp.where(both, a / scale, 0.0), jnp.where(both, b / scale, 0.0)
    parts = [a * a, b * b, a * b, (a - b) ** 2, lost.astype(jnp.uint32)]
    starts = [jnp.float32(0)] * 4 + [jnp.uint32(0)]
    sums = lax.reduce(parts, starts, _added, tuple(range(a.ndim)))
    return (*sums, largest)


def _added(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(p + q for p, q in zip(a, b, strict=True))


def _as_float32(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    return x.astype(jnp.float32)


def _as_read(declared: Any, mixed: Any) -> Any:
    """The float32 program's operand in the dtype that the value has in the mixed program."""
    dtype = getattr(mixed, "dtype", None)
    if dtype is None or getattr(declared, "dtype", dtype) == dtype:
        return declared
    return lax.convert_element_type(declared, dtype)


def _code(x: Any) -> np.uint32:
    name = x.dtype.name
    return np.uint32(COMPUTED.index(name) if name in COMPUTED else 0)
