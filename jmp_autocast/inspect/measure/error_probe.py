"""The errors of a program in mixed precision, equation by equation."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .devices import is_whole_on_device, on_mesh_of, readable
from .measured import as_real, is_measurable, largest_element
from .recorder import EquationRun, Probe

# The dtypes that a result may have in the mixed program; "" is any other dtype. An `ErrorReading`
# can only hold arrays, not names, so it holds the position of a dtype in this tuple.
COMPUTED = ("", "float64", "float32", "float16", "bfloat16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class ArrayError:
    """The error of an array, such as an output, against its reference.

    It is a pytree, so that a jitted function may return it.

    Args:
        error: The relative error: the norm of the difference over the norm of the float32 value.
            NaN for an output or a gradient without a finite element in the float32 program.
        cosine: The cosine of the angle between the array and its reference.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        largest: The largest finite magnitude in the float32 program.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import FP16, compare
        >>> output = compare(jnp.matmul, jnp.eye(8), jnp.full((8, 8), 7e4), policy=FP16).outputs[0]
        >>> output.error, output.lost, output.largest
        (inf, 64, 70000.0)
    """

    error: float
    cosine: float
    lost: int
    largest: float


class ErrorReading(NamedTuple):
    """The errors of equations, each in its worst run.

    Args:
        error: This and the next three fields are those of the result's `ArrayError`.
        cosine: The cosine of the angle.
        lost: The number of elements that are no longer finite.
        largest: The largest magnitude of the reference.
        introduced: The error of the equation alone: it runs in mixed precision, but on the operands
            of the float32 program, cast to the dtypes of mixed precision.
        introduced_lost: The number of elements that the equation alone makes infinite or NaN.
        runs: How often the equation ran.
        computed: The dtype in the mixed program, as a position in `COMPUTED`.
    """

    # The defaults are for an equation that has not run: the error 0, and the angle 0.
    error: Any = np.float32(0)
    cosine: Any = np.float32(1)
    lost: Any = np.uint32(0)
    largest: Any = np.float32(0)
    introduced: Any = np.float32(0)
    introduced_lost: Any = np.uint32(0)
    runs: Any = np.uint32(0)
    computed: Any = np.uint32(0)


# Readings of two runs are merged by the maximum, except for these fields. Narrower dtypes have
# larger positions in `COMPUTED`, so one run in 16 bits makes the merged dtype a 16-bit one.
_MERGED = {"cosine": jnp.minimum} | dict.fromkeys(("lost", "introduced_lost", "runs"), jnp.add)


class ErrorProbe(Probe):
    """Measures the errors of program 1, in mixed precision, against program 0, in float32."""

    unread: Any = ErrorReading()

    def measure(self, run: EquationRun) -> tuple[_Sums, _Sums, Any]:
        """Returns the sums for `error` and `introduced`, and the dtype's position in `COMPUTED`."""
        declared, mixed = run.operands
        # The operands of the float32 program have no errors of earlier equations. The equation runs
        # on them once more in the mixed program, so the error of this result is the equation's own.
        read = list(map(_as_read, declared, mixed))
        alone = run.again(1, read)
        measured = [
            (_sums(reference, result), _sums(reference, own), _code(result))
            for reference, result, own in zip(*run.results, alone, strict=True)
            if is_measurable(jax.typeof(reference))
        ]
        # An equation of several results has their largest error, and the dtype of the first.
        sums, own, codes = zip(*measured, strict=True)
        return functools.reduce(_worst, sums), functools.reduce(_worst, own), codes[0]

    def settle(self, measured: Any, held: Any, ticks: Any) -> ErrorReading:
        """Turns the measurements of one run of several equations into their readings."""
        sums, own, code = measured
        of_result = _distance(sums), (_error(own), own.lost, jnp.ones_like(ticks), code)
        return ErrorReading(*jax.tree.leaves(of_result))

    def merge(self, first: ErrorReading, second: ErrorReading) -> ErrorReading:
        """Merges readings of the same equations: those of earlier (``first``) and of later runs."""
        pairs = zip(ErrorReading._fields, first, second, strict=True)
        return ErrorReading(*(_MERGED.get(name, jnp.maximum)(x, y) for name, x, y in pairs))


def distance(reference: Any, result: Any) -> ArrayError:
    """Returns the error of an array of floats or complex numbers against its reference.

    The error is 0 if the reference has no finite element.
    """
    with on_mesh_of(reference):
        return _distance(_sums(reference, result))


def distance_and_norms(reference: Any, result: Any) -> tuple[ArrayError, tuple[Any, Any]]:
    """Returns the error of an array, and the norms of the difference and of the reference.

    The error is the ratio of the norms, which only include elements that are finite in both arrays.
    If an element became infinite or NaN, the norm of the difference is infinite. If the reference
    has no finite element, the error and the norm of the difference are NaN.
    """
    with on_mesh_of(reference):
        sums = _sums(reference, result)
        return _distance(sums, of_nothing=jnp.nan), _norms(sums)


def worst_of(errors: Iterable[float]) -> float:
    """Returns the largest error, NaN if an error is NaN, 0 if there are no errors."""
    return float(np.max([0.0, *errors]))


def largest_difference(reference: Any, result: Any) -> Any:
    """Returns the largest absolute difference between the elements of two arrays."""
    a, b = _wide(reference, result)
    # Both arrays may have an infinity, as in a mask; the difference of infinities is NaN.
    return largest_element(jnp.where(a == b, 0.0, jnp.abs(a - b)))


class _Sums(NamedTuple):
    """Sums over the elements of an array and its reference, both divided by ``largest``.

    Args:
        lost: The number of elements that are finite in the reference alone.
        known: The number of elements that are finite in the reference.
        reference: The sum of the squares of the reference.
        result: The sum of the squares of the array.
        product: The sum of the products of the array and the reference.
        difference: The sum of the squares of the differences.
        largest: The largest finite magnitude in the reference.
    """

    lost: Any
    known: Any
    reference: Any
    result: Any
    product: Any
    difference: Any
    largest: Any


@jax.jit
def _sums(reference: Any, result: Any) -> _Sums:
    a, b = _wide(reference, result)
    known, lost = jnp.isfinite(a), jnp.isfinite(a) & ~jnp.isfinite(b)
    # Elements that are not finite in the reference are left out.
    largest = jnp.max(jnp.where(known, jnp.abs(a), 0.0))
    both = known & ~lost
    # Without a scale, the square of 1e20 is infinite in float32, and the square of 1e-23 is 0.
    scale = jnp.where(largest > 0, largest, 1.0)
    a, b = jnp.where(both, a / scale, 0.0), jnp.where(both, b / scale, 0.0)
    counts = [lost.astype(jnp.uint32), known.astype(jnp.uint32)]
    parts = [*counts, a * a, b * b, a * b, (a - b) ** 2]
    starts = [jnp.zeros((), part.dtype) for part in parts]
    # All sums are one reduction, which passes over both arrays only once.
    add = lambda xs, ys: tuple(map(operator.add, xs, ys))  # noqa: E731
    lost, known, *sums = lax.reduce(parts, starts, add, tuple(range(a.ndim)))
    # The sums are scaled, so float32 is enough; sums of all dtypes can be stacked into one array.
    return _Sums(lost, known, *(x.astype(jnp.float32) for x in (*sums, largest)))


@jax.jit
def _worst(one: _Sums, other: _Sums) -> _Sums:
    # All fields come from the result with the larger error, except `largest`: it is the maximum.
    worse = _error(other) > _error(one)
    picked = jax.tree.map(lambda a, b: jnp.where(worse, b, a), one, other)
    return picked._replace(largest=jnp.maximum(one.largest, other.largest))


@jax.jit
def _norms(sums: _Sums) -> tuple[Any, Any]:
    scale = jnp.where(sums.largest > 0, sums.largest, 1.0)
    difference = jnp.where(sums.lost > 0, jnp.inf, scale * jnp.sqrt(sums.difference))
    difference = jnp.where(sums.known > 0, difference, jnp.nan)
    return difference, scale * jnp.sqrt(sums.reference)


@jax.jit
def _distance(sums: _Sums, of_nothing: Any = 0.0) -> ArrayError:
    # The roots are multiplied, not the sums: a sum may be near the largest float32, 3e38, and the
    # product of two sums would be infinite.
    length = jnp.sqrt(sums.reference) * jnp.sqrt(sums.result)
    cosine = jnp.where(length > 0, sums.product / jnp.where(length > 0, length, 1.0), 1.0)
    # Rounding may make the cosine 1 + 1.2e-7, so it is clipped.
    error: Any = jnp.where(sums.known > 0, _error(sums), of_nothing)
    measured: list[Any] = [error, jnp.clip(cosine, -1.0, 1.0), sums.lost, sums.largest]
    return ArrayError(*measured)


def _error(sums: _Sums) -> Any:
    """Returns the relative error, infinity if an element became infinite or NaN."""
    some = sums.reference > 0
    relative = jnp.sqrt(sums.difference / jnp.where(some, sums.reference, 1.0))
    # If the reference is zero, the error is infinite, or 0 for an equal result.
    of_zero = jnp.where(sums.difference > 0, jnp.inf, 0.0)
    error = jnp.where(some, relative, of_zero)
    return jnp.where(sums.lost > 0, jnp.inf, error).astype(jnp.float32)


def _wide(reference: Any, result: Any) -> tuple[Any, Any]:
    # Float64 arrays are summed in float64, so that errors of 1e-12 are seen.
    wide = jnp.float64 if jnp.finfo(reference.dtype).bits == 64 else jnp.float32
    a, b = (as_real(readable(x)).astype(wide) for x in (reference, result))
    return a, b


def _as_read(declared: Any, mixed: Any) -> Any:
    """Returns the float32 program's operand, cast to the dtype of the mixed program's operand."""
    dtype = getattr(mixed, "dtype", None)
    if dtype is None or getattr(declared, "dtype", dtype) == dtype:
        return declared
    # The cast must run on the mesh of the operand. For a `reshard`, this may be another mesh than
    # that of the trace.
    with on_mesh_of(declared):
        avals = jax.typeof(declared), jax.typeof(mixed)
        if not all(is_measurable(aval) and is_whole_on_device(aval) for aval in avals):
            return lax.convert_element_type(declared, dtype)
        return _cast_and_clamped(declared, mixed)


@jax.jit
def _cast_and_clamped(declared: Any, mixed: Any) -> Any:
    # If a mask has the largest finite float32, the mixed program has the largest finite number of
    # the 16-bit dtype there. The cast would be infinite, so the value of the mixed program is used.
    cast = lax.convert_element_type(declared, mixed.dtype)
    clamped = jnp.isfinite(declared) & ~jnp.isfinite(cast) & jnp.isfinite(mixed)
    return jnp.where(clamped, mixed, cast)


def _code(x: Any) -> np.uint32:
    name = x.dtype.name
    return np.uint32(COMPUTED.index(name) if name in COMPUTED else 0)
