"""The hash of JAX's default random numbers, which only `jax.extend` exports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def threefry_bits(key: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the random bits of ``jax.random.bits`` for elements at given flat indices.

    Args:
        key: The data of a threefry key, ``uint32[2]``.
        counts: uint32 array of flat indices, in an array of fewer than 2**32 elements.

    Returns:
        uint32 array; a draw with a narrower dtype consists of its lowest bits.
    """
    high, low = threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(counts), counts)
    return high ^ low
