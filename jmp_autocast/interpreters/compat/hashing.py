"""The hash that JAX's default random numbers are made of; JAX has it in `jax.extend` only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def threefry_bits(key: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the bits that ``jax.random.bits`` draws for the elements at these flat indices.

    Args:
        key: The data of a threefry key, ``uint32[2]``.
        counts: uint32 array: the numbers of elements in an array of fewer than 2**32.

    Returns:
        uint32 array; narrower draws are its lowest bits.
    """
    high, low = threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(counts), counts)
    return high ^ low
