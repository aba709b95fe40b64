"""Counts infinities, NaNs, and values out of the range of float16.

The flags of a value are two bits: whether it holds a NaN, and whether it holds an infinity.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...interpreters.compat import Tracer, is_ref
from .devices import readable
from .measured import as_real, is_measurable
from .recorder import EquationRun, Probe

# In float16, magnitudes of 65520 and above round to infinity, and those of 2**-25 and below to 0.
# The two bounds are ties, which round to even: the largest float16 is 65504, and the smallest is
# 2**-24.
FLOAT16_OVERFLOW = 65520.0
FLOAT16_UNDERFLOW = 2.0**-25

# Counts and positions have 32 bits: without x64 JAX has no wider integers. Counts saturate at the
# largest number; as a position, the largest number means "never".
NEVER = np.uint32(2**32 - 1)
INFINITY = np.float32(np.inf).view(np.uint32)


class Counts(NamedTuple):
    """The counts of an array, up to 2**32 - 1; None for those that were not requested.

    Args:
        nan: The number of NaNs.
        inf: The number of infinities.
        zero: The number of zeros.
        subnormal: The number of subnormal values of the dtype.
        large: The number of finite values that a float16 rounds to infinity.
        small: The number of values other than 0 that a float16 rounds to 0.
        largest: The largest finite magnitude, 0 if there is none. It is a uint32 with the bits of a
            float32: magnitudes compare like their bits.
        smallest: The smallest magnitude other than 0, infinity if there is none, also as bits.
    """

    nan: Any
    inf: Any
    zero: Any = None
    subnormal: Any = None
    large: Any = None
    small: Any = None
    largest: Any = None
    smallest: Any = None


class Reading(NamedTuple):
    """The readings of equations, over all their runs.

    Args:
        counts: The counts of their results.
        runs: How often each equation ran.
        bad_runs: The number of runs with a fault (see `NumericsRow`).
        first_run: The first run with a fault, counted from 0; 2**32 - 1 without a fault.
        first: The number of equations that ran before that run; 2**32 - 1 without a fault.
    """

    counts: Counts
    runs: Any
    bad_runs: Any
    first_run: Any
    first: Any


# The flags of a value: the first bit if it holds a NaN, the second if it holds an infinity.
_NAN, _INF = np.uint8(1), np.uint8(2)


def _flags(nan: Any, inf: Any) -> Any:
    return nan.astype(np.uint8) * _NAN | inf.astype(np.uint8) * _INF


class NumericsProbe(Probe):
    """Counts the elements of each equation's results, and finds the equation of the first fault.

    A NaN is a fault if no operand holds a NaN, and an infinity if all operands are finite. An
    infinity that the program itself contains, as in a mask, is no fault.

    Args:
        overflow: Whether a value out of the range of float16 is a fault, too.
        ranges: Whether to count more than NaNs and infinities, which takes XLA twice as long to
            compile.
    """

    has_flags = True

    def __init__(self, overflow: bool = False, ranges: bool = True) -> None:
        self._overflow = overflow
        self._ranges = ranges
        no = np.uint32(0)
        # `largest` starts at 0 and `smallest` at infinity, so that any value replaces them.
        of_ranges = (no, no, no, no, no, INFINITY) if ranges else ()
        self.unread: Any = Reading(Counts(no, no, *of_ranges), no, no, NEVER, NEVER)

    def measure(self, run: EquationRun) -> Any:
        """Counts the elements of the results of an equation."""
        (results,) = run.results
        counts = [_counts(x, self._ranges) for x in results if is_measurable(jax.typeof(x))]
        # The counts stay scalars, which are stacked for all equations at once. If each equation had
        # a vector of its counts, XLA would compile a concatenation per equation.
        return functools.reduce(_sum, counts)

    def flags_of(self, array: Any) -> Any:
        """Returns the flags of an array, or of the array in a ref."""
        if is_ref(jax.typeof(array)):
            array = array[...]  # NumPy would iterate over a ref without end
        if not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
            return np.uint8(0)
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            # The jitted `_counts` is not compiled again if it has measured an equal aval before.
            return self.flags_made(jax.device_get(_counts(array, self._ranges)))
        # NumPy arrays are reduced by NumPy, without a compilation.
        numpy = jnp if isinstance(array, jax.Array) else np
        array = readable(array) if isinstance(array, jax.Array) else array
        # `max` would not do: on XLA:CPU it drops a NaN among many float32 numbers.
        return _flags(numpy.isnan(array).any(), numpy.isinf(array).any())

    def passes_on(self, arguments: Iterable[Any], results: Iterable[Any]) -> Any:
        """Returns whether a NaN or infinity of an argument may have reached a result.

        An infinity counts only in a scalar result: an array may be masked with infinities.
        """
        shown = [self.flags_of(x) & (_NAN if jnp.ndim(x) else _NAN | _INF) for x in results]
        reached = functools.reduce(operator.or_, shown, np.uint8(0)) > 0
        if not isinstance(reached, Tracer) and not reached:
            return np.bool_(False)
        held = functools.reduce(operator.or_, map(self.flags_of, arguments), np.uint8(0))
        return reached & (held > 0)

    def flags_made(self, measured: Any) -> Any:
        """Returns the flags of the results of an equation, given their counts."""
        return _flags(measured.nan > 0, measured.inf > 0)

    def settle(self, measured: Any, held: Any, ticks: Any) -> Reading:
        """Turns the measurements of one run of several equations into their readings."""
        counts, nan, inf = measured, held & _NAN > 0, held & _INF > 0
        # A NaN in an operand excuses NaNs and infinities in the results. An infinity in an operand
        # excuses only infinities: inf - inf is a NaN, and a fault.
        bad = (counts.nan > 0) & ~nan | (counts.inf > 0) & ~nan & ~inf
        if self._overflow:
            bad |= counts.large > 0
        return Reading(
            counts=counts,
            runs=jnp.ones_like(ticks),
            bad_runs=bad.astype(jnp.uint32),
            first_run=jnp.where(bad, np.uint32(0), NEVER),
            first=jnp.where(bad, ticks, NEVER),
        )

    def merge(self, first: Reading, second: Reading) -> Reading:
        """Merges readings of the same equations: those of earlier (``first``) and of later runs."""
        # The later runs are numbered after the earlier ones.
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
    """Adds counts, and stops at the largest uint32."""
    return jnp.where(a > NEVER - b, NEVER, a + b)


def _sum(a: Counts, b: Counts, add: Any = _saturating) -> Counts:
    # The last two fields are `largest` and `smallest`. All others are counts.
    ways = [add] * (len(Counts._fields) - 2) + [jnp.maximum, jnp.minimum]
    each = zip(ways, a, b, strict=True)
    return Counts(*(None if p is None else way(p, q) for way, p, q in each))


@functools.partial(jax.jit, static_argnums=1)
def _counts(x: Any, ranges: bool) -> Counts:
    """Returns all counts of an array, in one pass over it.

    Magnitudes are compared by their bits, as integers: a device that flushes subnormals to zero
    would count them as zeros. No magnitude is compared with 0, because LLVM turns such a comparison
    into a comparison of floats. Instead 1 is subtracted, which maps 0 to the largest integer.
    """
    x = as_real(readable(x))
    bits = _magnitude_bits(x)
    # As integers, the bits of a NaN are larger than those of an infinity: the exponents are equal,
    # and only the NaN has a fraction.
    whole = bits.dtype.type
    infinity = _bits_of(np.inf, whole)
    masks, extremes, ends = [bits > infinity, bits == infinity], [], []
    if ranges:
        normal = _bits_of(jnp.finfo(x.dtype).smallest_normal, whole)
        finite, below = bits < infinity, bits - whole(1)
        masks += [
            bits < normal,
            below < normal - whole(1),
            finite & (bits >= _bits_of(FLOAT16_OVERFLOW, whole)),
            below < _bits_of(FLOAT16_UNDERFLOW, whole),
        ]
        ends = [whole(0), infinity - whole(1)]
        extremes = [jnp.where(finite, bits, ends[0]), jnp.minimum(below, ends[1])]
    values = [*(mask.astype(jnp.uint32) for mask in masks), *extremes]
    starts = [*(np.uint32(0) for _ in masks), *ends]
    # A count of fewer than 2**32 elements cannot overflow.
    add = _saturating if x.size > NEVER else operator.add

    def combine(a: Any, b: Any) -> list[Any]:
        return [each for each in _sum(Counts(*a), Counts(*b), add) if each is not None]

    found = Counts(*lax.reduce(values, starts, combine, tuple(range(x.ndim))))
    if not ranges:
        return found
    # The mask of `zero` includes the subnormals, so they are subtracted. The smallest magnitude was
    # found after subtracting 1, so 1 is added.
    return found._replace(
        zero=found.zero - found.subnormal,
        largest=_single_bits(found.largest),
        smallest=_single_bits(found.smallest + whole(1)),
    )


def _magnitude_bits(x: Any) -> Any:
    """Returns the bits of magnitudes, as float64 if the array is float64, else as float32."""
    if x.dtype == jnp.float64:
        return lax.bitcast_convert_type(x, jnp.uint64) & np.uint64(2**63 - 1)
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        # The cast is exact. A subnormal float16 or float8 is a normal float32, so none is flushed.
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return bits & np.uint32(2**31 - 1)


def _bits_of(number: Any, whole: Any) -> Any:
    return np.array(number, {4: np.float32, 8: np.float64}[whole(0).itemsize]).view(whole)[()]


def _single_bits(bits: Any) -> Any:
    """Converts the bits of a magnitude to float32; a float64 is clipped to the range of float32."""
    if bits.dtype == jnp.uint32:
        return bits
    ends = jnp.finfo(jnp.float32)
    least, most = (_bits_of(end, np.uint64) for end in (ends.smallest_normal, ends.max))
    inside = lax.bitcast_convert_type(jnp.clip(bits, least, most), jnp.float64)
    # Magnitudes below `least`, the smallest normal number 2**-126, are raised to it. Otherwise a
    # device may flush them to 0, and 0 means that there was no value.
    single = lax.bitcast_convert_type(inside.astype(jnp.float32), jnp.uint32)
    none, infinite = bits < np.uint64(1), bits == _bits_of(np.inf, np.uint64)
    return jnp.where(none, np.uint32(0), jnp.where(infinite, INFINITY, single))
