"""Counting what can go wrong in an array: infinities, NaNs, what a float16 could not hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .blocks import Run
from .sites import is_measured

# Half a step above the largest float16, 65504, and half of the smallest, 2**-24: rounding gives
# infinity from the one on, and 0 down from the other.
FLOAT16_OVERFLOW = 65520.0
FLOAT16_UNDERFLOW = 2.0**-25

NEVER = np.uint32(2**32 - 1)


class Counts(NamedTuple):
    """What arrays hold. Counts stop at 2**32 - 1.

    Args:
        nan: The number of NaNs.
        inf: The number of infinities.
        zero: The number of zeros.
        subnormal: The number of subnormal values of the dtype.
        large: The number of finite values that a float16 rounds to infinity.
        small: The number of values other than 0 that a float16 rounds to 0.
        largest: The largest finite magnitude, 0 if there is none.
        smallest: The smallest magnitude other than 0, infinity if there is none.
    """

    nan: Any
    inf: Any
    zero: Any
    subnormal: Any
    large: Any
    small: Any
    largest: Any
    smallest: Any


class Reading(NamedTuple):
    """What equations made, over all their runs.

    Args:
        counts: What is in their results.
        runs: How often each ran.
        bad_runs: How many of these runs made what is looked for.
        first_run: The run that was the first to make it, counted from 0; 2**32 - 1 for none.
        first: How many equations had run before that; 2**32 - 1 for none.
    """

    counts: Counts
    runs: Any
    bad_runs: Any
    first_run: Any
    first: Any


class NumericsProbe:
    """Counts what each equation makes, and marks who made the first bad value.

    A NaN is laid to the equation that made it from operands without one, an infinity to the one
    that made it from finite operands: an infinity that the program writes down, as in a mask, is
    nobody's fault.

    Args:
        overflow: Look for values that a float16 could not hold, too.
    """

    flags = 2

    def __init__(self, overflow: bool = False) -> None:
        self._overflow = overflow

    def measure(self, run: Run) -> tuple[Any, ...]:
        """Counts what is in the results of an equation."""
        (results,) = run.results
        counts = [_counts(x) for x in results if is_measured(jax.typeof(x))]
        total = counts[0]
        for other in counts[1:]:
            total = _sum(total, other)
        return tuple(total)

    def flags_of(self, array: Any) -> tuple[Any, Any]:
        """Returns whether an array holds a NaN, and whether an infinity."""
        if not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
            return False, False
        if isinstance(array, jax.Array):
            return jnp.any(jnp.isnan(array)), jnp.any(jnp.isinf(array))
        return bool(np.any(np.isnan(array))), bool(np.any(np.isinf(array)))

    def flags_made(self, measured: tuple[Any, ...]) -> tuple[Any, Any]:
        """Returns whether there is a NaN, and whether an infinity, in what equations made."""
        counts = Counts(*measured)
        return counts.nan > 0, counts.inf > 0

    def settle(self, measured: tuple[Any, ...], held: tuple[Any, ...], ticks: Any) -> Reading:
        """Returns the readings of equations that have each run once."""
        counts, (nan, inf) = Counts(*measured), held
        bad = (counts.nan > 0) & ~nan | (counts.inf > 0) & ~nan & ~inf
        if self._overflow:
            bad |= counts.large > 0
        never = NEVER
        return Reading(
            counts=counts,
            runs=jnp.ones_like(ticks),
            bad_runs=bad.astype(jnp.uint32),
            first_run=jnp.where(bad, jnp.uint32(0), never),
            first=jnp.where(bad, ticks, never),
        )

    def nothing(self, count: int) -> Reading:
        """Returns the readings of equations that have not run."""
        no = jnp.zeros(count, jnp.uint32)
        never = jnp.full(count, NEVER, jnp.uint32)
        none, all_ = jnp.zeros(count, jnp.float32), jnp.full(count, jnp.inf, jnp.float32)
        return Reading(Counts(no, no, no, no, no, no, none, all_), no, no, never, never)

    def merge(self, first: Reading, second: Reading) -> Reading:
        """Returns the readings of two runs of the same equations, ``first`` the earlier."""
        late = jnp.where(
            second.first_run == NEVER, NEVER, _saturating(first.runs, second.first_run)
        )
        return Reading(
            counts=_sum(first.counts, second.counts),
            runs=_saturating(first.runs, second.runs),
            bad_runs=_saturating(first.bad_runs, second.bad_runs),
            first_run=jnp.where(first.first_run == NEVER, late, first.first_run),
            first=jnp.minimum(first.first, second.first),
        )


def _saturating(a: Any, b: Any) -> Any:
    return jnp.where(a > NEVER - b, NEVER, a + b)


def _sum(a: Any, b: Any) -> Counts:
    """Adds `Counts`, or plain sequences of the same length."""
    sums = [_saturating(p, q) for p, q in zip(a[:-2], b[:-2], strict=True)]
    return Counts(*sums, jnp.maximum(a[-2], b[-2]), jnp.minimum(a[-1], b[-1]))


@jax.jit
def _counts(x: Any) -> Counts:
    """Counts all in one pass over the array."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    # float64 beyond float32's range counts as the end of that.
    magnitude = jnp.abs(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    single = jnp.clip(magnitude, None, jnp.finfo(jnp.float32).max).astype(jnp.float32)
    finite = jnp.isfinite(x)
    zero, subnormal = _zero_and_subnormal(x)
    masks = (
        jnp.isnan(x),
        jnp.isinf(x),
        zero,
        subnormal,
        finite & (magnitude >= FLOAT16_OVERFLOW),
        finite & ~zero & (magnitude <= FLOAT16_UNDERFLOW),
    )
    ones = [mask.astype(jnp.uint32) for mask in masks]
    extremes = [jnp.where(finite, single, 0.0), jnp.where(finite & ~zero, single, jnp.inf)]
    starts = [*(jnp.uint32(0) for _ in ones), jnp.float32(0), jnp.float32(jnp.inf)]
    return Counts(*lax.reduce([*ones, *extremes], starts, _sum, tuple(range(x.ndim))))


def _zero_and_subnormal(x: Any) -> tuple[Any, Any]:
    """By bits: a device that flushes subnormals to zero takes them for equal to it."""
    info = jnp.finfo(x.dtype)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned)
    mantissa = bits & unsigned((1 << info.nmant) - 1)
    exponent = (bits >> unsigned(info.nmant)) & unsigned((1 << info.nexp) - 1)
    zero = (exponent == 0) & (mantissa == 0)
    return zero, (exponent == 0) & (mantissa != 0)
