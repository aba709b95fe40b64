"""Rounds float32 values to those of a number format, in float32, by arithmetic on their bits.

XLA takes a cast to 16 or 8 bits with a cast back for nothing, and no device has dtypes of five
bits. What is here rounds the same on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..interpreters.compat import inlined
from ..policies.formats import Emulated, Format, parse

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_EXPONENT = 0x7F800000
_MANTISSA = 23
# The largest power of two whose inverse is a normal number, too: XLA:CPU takes others for zero.
_SMALLEST = 2.0**-126


def rounded(
    x: Any,
    format: Format | str,
    *,
    key: jax.Array | None = None,
    saturate: bool = False,
    axis: int = -1,
) -> jax.Array:
    """Rounds to the values of a format: to the nearest, ties to even, or stochastically.

    It has no derivative of its own: the caller says what a rounding has.

    Args:
        x: A float32 array.
        format: The format, or its name.
        key: A PRNG key: to one of the two neighbors, so that the mean is exact. None: the nearest.
        saturate: What is beyond the largest number becomes that, an infinity too. By default it
            becomes what the format has: an infinity, or NaN in one that has none. A format without
            a NaN saturates always, and so does one with scales of blocks. NaN stays NaN.
        axis: The dimension along which elements share scales, in a format with scales of blocks. A
            last block may be shorter. An infinity or NaN makes its block NaN.

    Returns:
        A float32 array of values of the format, times the scales of the blocks.

    Example:
        >>> import jax.numpy as jnp
        >>> rounded(jnp.array([0.3, 17.0, 1e6]), "e5m2").tolist()
        [0.3125, 16.0, inf]
        >>> rounded(jnp.array([0.3, 17.0, 1e6]), "e4m3", saturate=True).tolist()
        [0.3125, 16.0, 448.0]
    """
    return _inlined(_to_format, parse(format), saturate, axis)(x, key)


def as_emulated(
    emulated: Emulated, format: Format, x: Any, axis: int = -1, draw: int = 0
) -> jax.Array:
    """Rounds an array as a policy says, in its own dtype; derivatives pass through as they are.

    Args:
        emulated: What the policy says.
        format: The format, one of its two.
        x: A float32 or 16-bit array.
        axis: As for `rounded`.
        draw: Tells the draws of arrays apart that are rounded side by side, as both factors of a
            product: with equal draws a square would err on one side.

    Example:
        >>> import jax.numpy as jnp
        >>> emulated = Emulated("e5m2", rounding="stochastic")
        >>> print(as_emulated(emulated, emulated.format, jnp.full(4096, 1.1)).mean().round(1))
        1.1
    """
    function = _inlined(_emulated, emulated, format, axis, draw)
    return straight_through(x, function(lax.stop_gradient(x)))


@jax.custom_jvp
def straight_through(x: Any, rounded: Any) -> Any:
    """Returns what was rounded, with the derivative of what it was rounded from.

    Args:
        x: What was rounded.
        rounded: What it was rounded to, without a derivative.

    Example:
        >>> print(jax.grad(lambda x: straight_through(x, jax.lax.stop_gradient(jnp.round(x))))(0.7))
        1.0
    """
    return rounded


@straight_through.defjvp
def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return primals[1], tangents[0]


# Outside of a trace one program for each shape, in place of one for each of twenty operations.
@functools.lru_cache(maxsize=4096)
def _inlined(function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    return inlined(lambda *arrays: function(*arrays, *options))


def _to_format(x: Any, key: Any, format: Format, saturate: bool, axis: int) -> Any:
    if format.block is not None and jnp.ndim(x):
        return _in_blocks(x, format, key, axis)
    if format.block is not None:
        return _in_blocks(jnp.reshape(x, 1), format, key, -1).reshape(())
    return _rounded(x, format, key, saturate)


def _emulated(x: Any, emulated: Emulated, format: Format, axis: int, draw: int) -> Any:
    dtype = jnp.result_type(x)
    x = lax.convert_element_type(x, jnp.float32)
    key = None
    if emulated.rounding == "stochastic":
        # Of the values themselves: a program stays a function, and another step, in which any
        # element changed, has other draws.
        total = jnp.sum(lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)
        key = jax.random.fold_in(jax.random.key(emulated.seed), draw)
        key = jax.random.fold_in(key, total)
    x = _to_format(x, key, format, emulated.overflow == "saturate", axis)
    return lax.convert_element_type(x, dtype)


def _rounded(x: Any, format: Format, key: jax.Array | None, saturate: bool) -> Any:
    if key is None and format.specials == "ieee" and format.exponent == 8 and not saturate:
        # One equation in place of a dozen, for the exponents of float32 itself: for fewer it takes
        # subnormal numbers for zero.
        return lax.reduce_precision(x, 8, format.mantissa)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = bits & _SIGN, bits & _MAGNITUDE
    draws = None if key is None else jax.random.bits(key, jnp.shape(x), jnp.uint32)
    result = _of_normal(magnitude, _MANTISSA - format.mantissa, draws)
    if format.bottom > -126:
        few = _of_subnormal(jnp.abs(x), format, draws)
        few = lax.bitcast_convert_type(few, jnp.uint32)
        result = jnp.where(magnitude < _bits(2.0**format.bottom), few, result)
    largest = _bits(format.largest)
    beyond = result > largest
    if saturate or format.specials == "none":
        result = jnp.where(beyond, largest, result)
    elif format.specials == "ieee":
        result = jnp.where(beyond, _INFINITY, result)
    else:
        result = jnp.where(beyond, _bits(np.nan), result)
    if format.specials == "unsigned":
        sign = jnp.where(result == 0, np.uint32(0), sign)
    # A NaN has the largest magnitudes of all, and adding to it may have left them.
    result = jnp.where(magnitude > _INFINITY, magnitude, result)
    return lax.bitcast_convert_type(sign | result, jnp.float32)


def _bits(value: float) -> np.uint32:
    return np.float32(value).view(np.uint32) & _MAGNITUDE


def _of_normal(magnitude: Any, dropped: int, draws: Any) -> Any:
    """Returns the bits of magnitudes without the last ones: a carry goes on into the exponent."""
    if not dropped:
        return magnitude
    rest = np.uint32(2**dropped - 1)
    if draws is None:
        # Half a step, less one unless the last bit that stays is odd: ties go to even.
        added = np.uint32(2 ** (dropped - 1) - 1) + ((magnitude >> np.uint32(dropped)) & 1)
    else:
        added = draws & rest
    # An infinity stays one: what is dropped of it is 0, and no draw is added to it.
    up = jnp.where(magnitude < _INFINITY, magnitude + added, magnitude)
    return up & ~rest


def _of_subnormal(magnitude: Any, format: Format, draws: Any) -> Any:
    """Returns multiples of the smallest number."""
    # Powers of two, and their inverses, are normal numbers of float32: no step is rounded.
    steps = magnitude * np.float32(1 / format.smallest)
    if draws is None:
        whole = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        whole = jnp.floor(steps)
        chance = (draws >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
        whole += (chance < steps - whole).astype(jnp.float32)
    return whole * np.float32(format.smallest)


def block_scales(x: Any, format: Format) -> Any:
    """Returns the scales of blocks: powers of two that the rounded elements are multiplied by.

    Args:
        x: A float32 array whose last dimension is a block.
        format: The format; its ``fits`` says by which rule.

    Returns:
        Scales of the shape of ``x``, with one element in the last dimension, NaN for a block that
        holds an infinity or a NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> block_scales(jnp.array([[1.0, 500.0], [3.0, 7.0]]), parse("mxfp8")).tolist()
        [[1.0], [0.015625]]
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    bits = lax.bitcast_convert_type(largest, jnp.uint32)
    if format.fits:
        # What lies beyond the last number of its binade carries into the exponent.
        bits += np.uint32(2**23 - 1) - (_bits(format.largest) & np.uint32(2**23 - 1))
    power = lax.bitcast_convert_type(bits & np.uint32(_EXPONENT), jnp.float32)
    scale = jnp.clip(power * np.float32(2.0**-format.top), _SMALLEST, 1 / _SMALLEST)
    return jnp.where(jnp.isfinite(largest), scale, np.float32(np.nan))


def _in_blocks(x: Any, format: Format, key: jax.Array | None, axis: int) -> Any:
    assert format.block is not None
    last = jnp.moveaxis(x, axis, -1)
    length = last.shape[-1]
    padding = [(0, 0)] * (last.ndim - 1) + [(0, -length % format.block)]
    blocks = jnp.pad(last, padding).reshape(*last.shape[:-1], -1, format.block)
    scale = block_scales(blocks, format)
    values = _rounded(blocks * (1 / scale), format, key, saturate=True) * scale
    values = values.reshape(*last.shape[:-1], -1)[..., :length]
    return jnp.moveaxis(values, -1, axis)
