"""Rounds float32 arrays to the values of a 16-bit dtype; the results stay in float32.

Casts are not used: XLA may remove a cast to 16 bits and back (``xla_allow_excess_precision``), and
the optimizer needs the rounding error.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .draws import bits

_EXPONENT = 0x7F800000  # the exponent bits of a float32
_ONE_OVER = 254 << 23  # 2**k has exponent bits k + 127; 1 / 2**k has 254 minus these
# Below this number, the distance between neighboring bfloat16 numbers is subnormal in float32, and
# XLA:CPU flushes subnormal numbers to zero.
_SMALLEST = 2.0**-100


def to_nearest(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to the nearest value of a 16-bit dtype, ties to even, as a cast does.

    Args:
        x: float32 array.
        dtype: float16 or bfloat16.

    Returns:
        float32 array of values that ``dtype`` holds.

    Example:
        >>> import jax.numpy as jnp
        >>> print(to_nearest(jnp.float32(1.003), jnp.dtype("bfloat16")))
        1.0
    """
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype != np.float16:
        return rounded
    # reduce_precision returns zero for the subnormal numbers of float16, which are the multiples of
    # 2**-24 below 6e-5.
    subnormal = jnp.abs(x) < float(info.smallest_normal)
    return jnp.where(subnormal, jnp.round(x * 2.0**24) * 2.0**-24, rounded)


def stochastically(key: jax.Array, x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds at random to one of the two nearest values of a 16-bit dtype, with an unbiased mean.

    A number at 30 % of the way from one value to the next is rounded to the next with a probability
    of 30 %. Probabilities are multiples of 2**-16. For bfloat16 this makes the mean exact, because
    float32 has 16 bits more.

    Args:
        key: A PRNG key.
        x: float32 array.
        dtype: float16 or bfloat16.

    Returns:
        float32 array of values that ``dtype`` holds; NaNs and infinities are not changed.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> x = jnp.full(10_000, 1.001)  # bfloat16 has 1 and 1.0078125
        >>> rounded = stochastically(jax.random.key(0), x, jnp.dtype("bfloat16"))
        >>> sorted(set(rounded.tolist())), bool(abs(rounded.mean() - 1.001) < 1e-4)
        ([1.0, 1.0078125], True)
    """
    info = jnp.finfo(dtype)
    power = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(_EXPONENT)
    smallest = max(float(info.smallest_normal), _SMALLEST)
    power = jnp.maximum(lax.bitcast_convert_type(power, jnp.float32), smallest)
    spacing = power * 2.0**-info.nmant
    # The inverse is computed from bits, because the division on a TPU is not exact.
    inverse = np.uint32(_ONE_OVER) - lax.bitcast_convert_type(spacing, jnp.uint32)
    steps = x * lax.bitcast_convert_type(inverse, jnp.float32)
    below = jnp.floor(steps)
    rounded = (below + _goes_up(key, steps - below)) * spacing
    return jnp.where(jnp.isfinite(x), rounded, x)


def _goes_up(key: jax.Array, probability: jax.Array) -> jax.Array:
    """Draws 1.0 with the given probabilities, in steps of 2**-16, else 0.0."""
    draws = bits(jax.random.key_data(key), probability.shape)
    return (draws.astype(jnp.float32) < probability * 2.0**16).astype(jnp.float32)
