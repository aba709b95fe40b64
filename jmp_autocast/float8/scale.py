"""Quantizes arrays to 8-bit values and scales, which the planner keeps as copies of the array.

The copies of an array are in a dict: the key `Values` stands for the 8-bit values, and the key
`ScaleOf` for the inverse scale. A tag is data that the planner attaches to an array.

A scale is a power of two. Multiplying by it or by its inverse rounds nothing, so the only error is
the rounding to 8 bits. For 400 random tensors in e4m3 the error was 2.650 %, against 2.644 % with
float32 scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..interpreters.compat import inlined
from ..interpreters.plan.copies import CopyKey, Tag
from ..policies import E4M3, FLOAT32, Float8
from .carriers import row_major
from .dimensions import DimensionNumbers

# The largest power of two in each format: the largest numbers are 448 = 1.75 * 2**8 and 57,344 =
# 1.75 * 2**15.
_TOP = {E4M3: 2.0**8, np.dtype(jnp.float8_e5m2): 2.0**15}
# Added to the bits of a float32, this increments the exponent if the mantissa is above 1.75.
_CARRY = 0x1FFFFF
_EXPONENT = 0x7F800000
# The smallest inverse scale, which arrays of zeros get: it and its inverse are normal numbers.
_SMALLEST = 2.0**-126


def rows_of(scaling: str, numbers: DimensionNumbers, rank: int, i: int) -> tuple[int, ...]:
    """Returns the dimensions along which factor ``i`` of a product has different scales.

    Args:
        scaling: ``Float8.scaling``.
        numbers: The dimension numbers of the product.
        rank: The rank of the factor.
        i: The factor's position, 0 or 1.

    Example:
        >>> numbers = (((1,), (0,)), ((), ()))
        >>> rows_of("row", numbers, 2, 1), rows_of("tensor", numbers, 2, 1)
        ((1,), ())
    """
    return tuple(d for d in range(rank) if scaling == "row" and d not in numbers[0][i])


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """The planner's tag of a parameter, or of a value that is computed only from parameters.

    Args:
        scales: The number of leading dimensions along which the stored scale varies; None for a
            value that is not stored in 8 bits.
        trained: Whether the value may have a gradient; a `QuantizedArray` has none.
    """

    scales: int | None = None
    trained: bool = True

    @property
    def in_slices(self) -> bool:
        """Whether the array is stored in 8 bits with several scales, one for each slice."""
        return bool(self.scales)

    def moved(self, is_whole: bool) -> Weight:
        """Returns the tag of the result of a data movement, such as a reshape or a slice.

        The result has the stored scale if there is only one and all elements are kept.
        """
        return self if is_whole and self.scales == 0 else Weight(trained=self.trained)

    def sliced(self) -> Weight:
        """Returns the tag of a slice along the first dimension."""
        return Weight(self.scales - 1 if self.scales else None, self.trained)

    def gives(self, key: CopyKey) -> bool:
        """Returns whether a loop slices stored 8-bit values and scales, not the float32 array."""
        return self.in_slices and isinstance(key, Values | ScaleOf) and key.when_moved != "anew"


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """The key of the 8-bit values of an array.

    Args:
        format: The dtype of the values. The field is not named ``dtype``, because NumPy would
            accept the key as a dtype.
        rows: The dimensions along which the values have different scales.
    """

    format: np.dtype
    rows: tuple[int, ...] = ()

    @property
    def when_moved(self) -> Literal["moves", "anew"]:
        """Says how to get the values of a moved (transposed or reshaped) array.

        They are the moved values; with row scales the array is quantized anew.
        """
        return "anew" if self.rows else "moves"

    def copies(self, x: Any, known: Mapping[CopyKey, Any], tag: Tag | None) -> dict[CopyKey, Any]:
        """Returns the values of ``x``, and also their scale if ``known`` does not hold it."""
        rows, rest = _scale_dimensions(self, x.ndim, tag)
        if (inverse := known.get(ScaleOf(self))) is not None:
            return {self: scaled(row_major(x), lax.expand_dims(inverse, rest), self.format)}
        values, inverse = quantize(x, self.format, rows)
        return {self: values, ScaleOf(self): lax.squeeze(inverse, rest)}

    def enters(self, tag: Tag | None, runs_again: bool) -> bool:
        """Returns whether a call takes the values as an operand, as all calls but checkpoints do.

        A checkpoint keeps its operands for the backward pass. With computed values as operands, the
        temporaries of a scanned MLP on an H100 were 1.18 times those of bfloat16, and with 2,048
        tokens 1.56 times. So a checkpoint takes values only if they are stored. Otherwise it takes
        their scale, and computes the values again.
        """
        return not runs_again or (isinstance(tag, Weight) and tag.scales is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleOf:
    """The key of the inverse scale of 8-bit values; row scales have the rank of the array.

    Args:
        values: The key of the values.
    """

    values: Values

    @property
    def when_moved(self) -> Literal["stays", "anew"]:
        """Says that a moved array keeps its scale; only row scales are computed anew."""
        return "anew" if self.values.rows else "stays"

    def copies(self, x: Any, known: Mapping[CopyKey, Any], tag: Tag | None) -> dict[CopyKey, Any]:
        """Returns the scale of ``x``, without its values."""
        rows, rest = _scale_dimensions(self.values, x.ndim, tag)
        inverse = _inlined(_inverse, self.values.format, rows)(lax.stop_gradient(x))
        return {self: lax.squeeze(inverse, rest)}

    def enters(self, tag: Tag | None, runs_again: bool) -> bool:
        """Returns True: a call that gets the scale as an operand saves a pass over the weight."""
        return True


def _scale_dimensions(
    key: Values, rank: int, tag: Tag | None
) -> tuple[tuple[int, ...], Sequence[int]]:
    """Returns the dimensions along which the scales differ, and those to drop from a new scale.

    A new scale has length 1 along the dropped dimensions, which a stored scale does not have.
    """
    stored = tag.scales or 0 if isinstance(tag, Weight) else 0
    if key.rows or not stored:
        return key.rows, ()
    return tuple(range(stored)), range(stored, rank)


def factor_keys(
    recipe: Float8, numbers: DimensionNumbers, rank: int, i: int
) -> tuple[Values, ScaleOf]:
    """Returns the keys of the values and the inverse scale of one factor of a product.

    Example:
        >>> factor_keys(Float8(), (((1,), (0,)), ((), ())), 2, 1)[0].format
        dtype(float8_e4m3fn)
    """
    values = Values(E4M3, rows_of(recipe.scaling, numbers, rank, i))
    return values, ScaleOf(values)


def quantize(x: Any, dtype: np.dtype, rows: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Returns an array in 8 bits and the inverse scale: ``x`` is about ``values * inverse``.

    The scale is the largest power of two with which no element exceeds the largest number of the
    format, so that nothing is clamped. The result has no derivative.

    Args:
        x: A float32, float16 or bfloat16 array.
        dtype: float8_e4m3fn or float8_e5m2.
        rows: The dimensions along which scales differ.

    Returns:
        The values, of dtype ``dtype``, and the inverse scale, float32: a scalar, or with ``rows``
        an array of the rank of ``x``. If an element is infinite or NaN, all values with its scale
        are NaN, so that losses and gradients show the fault.

    Example:
        >>> import jax.numpy as jnp
        >>> values, inverse = quantize(jnp.array([-3.5, 1.0]), jnp.dtype("float8_e4m3fn"))
        >>> values.tolist(), float(inverse)
        ([-448.0, 128.0], 0.0078125)
    """
    return _inlined(_quantized, np.dtype(dtype), rows)(lax.stop_gradient(x))


def scaled(x: Any, inverse: Any, dtype: np.dtype) -> Any:
    """Returns the values that `quantize` returns, for a known inverse scale."""
    return _inlined(_scaled, np.dtype(dtype))(lax.stop_gradient(x), inverse)


@functools.lru_cache(maxsize=4096)
def _inlined(function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    return inlined(lambda *arrays: function(*arrays, *options))


def _quantized(x: Any, dtype: np.dtype, rows: tuple[int, ...]) -> tuple[Any, Any]:
    inverse = _inverse(x, dtype, rows)
    return _scaled(x, inverse, dtype), inverse


def _scaled(x: Any, inverse: Any, dtype: np.dtype) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, FLOAT32) * (1 / inverse), dtype)


def _inverse(x: Any, dtype: np.dtype, rows: tuple[int, ...]) -> Any:
    largest = _largest_bits(x, rows)
    exponent = (largest + jnp.int32(_CARRY)) & jnp.int32(_EXPONENT)
    power = lax.bitcast_convert_type(exponent, FLOAT32)
    inverse = lax.clamp(_SMALLEST, power * (1 / _TOP[dtype]), 1 / _SMALLEST)
    # A NaN or an infinity makes the scale, and so all values, NaN. With any other scale, the
    # finite elements would be wrong.
    is_finite = largest < jnp.int32(_EXPONENT)
    return lax.select(is_finite, inverse, lax.full_like(inverse, jnp.nan))


def _largest_bits(x: Any, rows: tuple[int, ...]) -> Any:
    """Returns the largest magnitude as the bits of a float32, which have the order of the floats.

    As an integer, a NaN is above infinity. A maximum of floats is not used: XLA:CPU drops a NaN
    from about 4,096 or more elements, and the scale would be finite.
    """
    reduced = tuple(d for d in range(x.ndim) if d not in rows)
    magnitudes = lax.abs(lax.convert_element_type(x, FLOAT32))
    largest = lax.reduce_max(lax.bitcast_convert_type(magnitudes, jnp.int32), reduced)
    return lax.expand_dims(largest, reduced) if rows else largest
