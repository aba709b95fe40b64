"""Keys and random bits, made so that GPU kernels for different arrays share no operand.

XLA for GPUs merges kernels that read the same array, however small. `jax.random.bits` counts the
elements with a vector that all arrays of one width share, and `jax.random.split` returns one array
of keys. With such shared operands, one kernel updates all matrices, and all their gradients are
alive at the same time. Kernels that share only scalars are not merged.

`split` and `bits` are jitted, so that each is traced once for a count or shape. Without ``jit``,
444 draws took 0.5 s more, and each eager call traced its branches again.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..interpreters.compat.hashing import threefry_bits

_COUNTABLE = 2**32  # the number of elements that 32 bits can count


def as_key(data: jax.Array) -> jax.Array:
    """Returns the threefry key with the data ``uint32[2]``."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


@functools.partial(jax.jit, static_argnums=1, inline=True)
def split(key: jax.Array, count: int) -> list[jax.Array]:
    """Splits a threefry key, given as ``uint32[2]`` data, into the data of ``count`` keys."""
    if not count:
        return []

    def at_once(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(as_key(key), count)
        return list(jax.random.key_data(keys))

    # On a GPU, each key is computed from scalars. If the keys were slices of one array, behind a
    # barrier, each slice would be a kernel: 565 kernels instead of 315 for a GPT in 148 arrays. On
    # a TPU, the keys are slices of one array, because each operation on a scalar is a kernel there:
    # 1,760 kernels instead of 380 for six matrices.
    def one_by_one(key: jax.Array) -> list[jax.Array]:
        own = as_key(key)
        return [jax.random.key_data(jax.random.fold_in(own, n)) for n in range(count)]

    return lax.platform_dependent(key, cuda=one_by_one, rocm=one_by_one, default=at_once)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns ``jax.random.bits`` in uint16 for the data of a threefry key."""

    def by_jax(key: jax.Array) -> jax.Array:
        return jax.random.bits(as_key(key), shape, jnp.uint16)

    def by_number(key: jax.Array) -> jax.Array:
        numbers = lax.iota(np.uint32, math.prod(shape)).reshape(shape)
        return threefry_bits(key, numbers).astype(jnp.uint16)

    symbolic = not all(isinstance(length, int) for length in shape)
    if symbolic or math.prod(shape) >= _COUNTABLE:
        return by_jax(key)
    return lax.platform_dependent(key, cuda=by_number, rocm=by_number, default=by_jax)
