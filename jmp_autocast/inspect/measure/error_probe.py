"""How far a program in mixed precision is from the float32 one, equation by equation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .basic_blocks import EquationRun, Probe
from .materialize import materialized
from .measured import is_measurable

# Names of the dtypes that a result may have in the mixed program, by the code that stands for them
# in a reading, which has to be an array; "" is any other.
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

    def measure(self, run: EquationRun) -> tuple[_Sums, _Sums, Any]:
        """Returns the sums from which the errors of an equation follow, and its dtype's code."""
        declared, mixed = run.operands
        # On the float32 program's operands, rounded as they are read: what earlier equations did
        # wrong is not in them, so that the error of the result is this equation's own.
        alone = [materialized(x) for x in run.again(1, list(map(_as_read, declared, mixed)))]
        measured = [
            (_sums(reference, result), _sums(reference, own), _code(result))
            for reference, result, own in zip(*run.results, alone, strict=True)
            if is_measurable(jax.typeof(reference))
        ]
        # Several results are one row, with the largest error of all and the dtype of the first.
        sums, own, codes = zip(*measured, strict=True)
        return functools.reduce(_worst, sums), functools.reduce(_worst, own), codes[0]

    def settle(self, measured: Any, held: tuple[Any, ...], ticks: Any) -> ErrorReading:
        """Returns the readings of equations that have each run once."""
        sums, own, code = measured
        return ErrorReading(
            distance=_distance(sums),
            introduced=_error(own),
            introduced_lost=own.lost,
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
    return _distance(_sums(reference, result))


class _Sums(NamedTuple):
    """Sums over the elements of an array and its reference, scaled by the reference's largest.

    Args:
        reference: Of the squares of the reference.
        result: Of the squares of the array.
        product: Of the products of both.
        difference: Of the squares of the differences.
        lost: The number of elements that are finite in the reference alone.
        largest: The largest finite magnitude in the reference.
    """

    reference: Any
    result: Any
    product: Any
    difference: Any
    lost: Any
    largest: Any


@jax.jit
def _sums(reference: Any, result: Any) -> _Sums:
    a, b = _as_float32(reference), _as_float32(result)
    known, lost = jnp.isfinite(a), jnp.isfinite(a) & ~jnp.isfinite(b)
    largest = jnp.max(jnp.where(known, jnp.abs(a), 0.0))
    both = known & ~lost
    # Unscaled, the square of 1e20 is infinite and that of 1e-23 is 0, in float32.
    scale = jnp.where(largest > 0, largest, 1.0)
    a, b = jnp.where(both, a / scale, 0.0), jnp.where(both, b / scale, 0.0)
    parts = [a * a, b * b, a * b, (a - b) ** 2, lost.astype(jnp.uint32)]
    starts = [jnp.float32(0)] * 4 + [jnp.uint32(0)]
    # All sums in one pass over both arrays.
    sums: Any = lax.reduce(parts, starts, _added, tuple(range(a.ndim)))
    return _Sums(*sums, largest=largest)


def _worst(one: _Sums, other: _Sums) -> _Sums:
    worse = _error(other) > _error(one)
    picked = jax.tree.map(lambda a, b: jnp.where(worse, b, a), one, other)
    return picked._replace(largest=jnp.maximum(one.largest, other.largest))


def _distance(sums: _Sums) -> Distance:
    length = jnp.sqrt(sums.reference) * jnp.sqrt(sums.result)
    cosine = jnp.where(length > 0, sums.product / jnp.where(length > 0, length, 1.0), 1.0)
    return Distance(_error(sums), jnp.clip(cosine, -1.0, 1.0), sums.lost, sums.largest)


def _error(sums: _Sums) -> Any:
    """Returns the relative error, infinity where an element became infinite or NaN."""
    some = sums.reference > 0
    relative = jnp.sqrt(sums.difference / jnp.where(some, sums.reference, 1.0))
    of_zero = jnp.where(sums.difference > 0, jnp.inf, 0.0)
    error = jnp.where(some, relative, of_zero)
    return jnp.where(sums.lost > 0, jnp.inf, error).astype(jnp.float32)


def _added(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(p + q for p, q in zip(a, b, strict=True))


def _as_float32(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    return x.astype(jnp.float32)


def _as_read(declared: Any, mixed: Any) -> Any:
    """Returns the float32 program's operand in the dtype that the mixed program's has."""
    dtype = getattr(mixed, "dtype", None)
    if dtype is None or getattr(declared, "dtype", dtype) == dtype:
        return declared
    return lax.convert_element_type(declared, dtype)


def _code(x: Any) -> np.uint32:
    name = x.dtype.name
    return np.uint32(COMPUTED.index(name) if name in COMPUTED else 0)
