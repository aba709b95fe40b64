"""float32 to 8 bits and back, in blocks that share a scale.

An element is coded by the square root of its share of the largest element of its block. Codes of
square roots are dense near zero: of 255 codes the smallest stands for 1/65,025 of the largest
element, where codes at equal distances end at 1/255.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .rounding import goes_up


class Compressed(NamedTuple):
    """An array in few bits.

    Attributes:
        values: Its codes as uint8, in the array's own shape, so that its sharding fits.
        scales: The largest magnitude of each block along the last axis, float32, negative where
            all elements of the block are at least 0.
    """

    values: jax.Array
    scales: jax.Array


def quantized(key: jax.Array, x: jax.Array, block: int) -> Compressed:
    """Returns an array in 8 bits an element, rounded so that the mean is exact.

    An element between two codes becomes the upper one with the probability that makes its mean the
    element. A block without negative elements has 255 codes above zero, another has 127 on either
    side.

    Args:
        key: A PRNG key.
        x: float32 array of one dimension or more.
        block: The length of a block along the last axis, at most.
    """
    spec = _explicit_spec(x)
    if spec is None:
        return _quantized(key, x, block)
    axes = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
    devices = math.prod(jax.typeof(x).sharding.mesh.shape[axis] for axis in axes)
    is_split = -(-x.shape[-1] // block) % devices == 0
    specs: tuple[Any, Any] = spec, spec if is_split else PartitionSpec(*spec[:-1], None)
    function = functools.partial(_quantized, block=block)
    return _on_automatic_axes(x, function, Compressed(*specs))(key, x)


def _quantized(key: jax.Array, x: jax.Array, block: int) -> Compressed:
    blocks = _in_blocks(x, -(-x.shape[-1] // block))
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    unsigned = jnp.min(blocks, axis=-1, keepdims=True) >= 0
    levels = jnp.where(unsigned, 255.0, 127.0)
    share = jnp.abs(blocks) / jnp.where(largest > 0, largest, 1.0)
    below = jnp.floor(jnp.sqrt(share) * levels)
    # The codes n and n + 1 stand for n**2 and n**2 + 2 n + 1 shares of 1 / levels**2.
    probability = (share * levels**2 - below**2) / (2 * below + 1)
    code = jnp.minimum(below + goes_up(key, probability), levels)
    # A second moment that is not zero must not become zero: the step is divided by its root.
    code = jnp.where(unsigned & (share > 0), jnp.maximum(code, 1.0), code)
    code = jnp.where(unsigned, code, 128.0 + jnp.sign(blocks) * code)
    scales = jnp.where(unsigned, -largest, largest)
    return Compressed(_joined(code, x.shape).astype(jnp.uint8), scales[..., 0])


def dequantized(compressed: Compressed) -> jax.Array:
    """Returns the float32 array that 8-bit codes stand for."""
    spec = _explicit_spec(compressed.values)
    if spec is None:
        return _dequantized(compressed)
    return _on_automatic_axes(compressed.values, _dequantized, spec)(compressed)


def _dequantized(compressed: Compressed) -> jax.Array:
    values, scales = compressed
    scales = scales[..., None]
    code = _in_blocks(values.astype(jnp.float32), scales.shape[-2])
    unsigned = scales < 0
    distance = jnp.where(unsigned, code / 255.0, (code - 128.0) / 127.0)
    return _joined(distance * jnp.abs(distance) * jnp.abs(scales), values.shape)


def _explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """Returns how an array lies on explicit mesh axes, None where its last axis is on none.

    Blocks cut the last axis, and JAX asks how the pieces lie. Nobody but XLA has to know.
    """
    spec = jax.typeof(x).sharding.spec
    return spec if spec and spec[-1] is not None else None


def _on_automatic_axes(like: jax.Array, function: Callable[..., Any], specs: Any) -> Any:
    """Returns a function whose inside XLA divides among devices, with results that lie as said."""

    def of(*arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.typeof(like).sharding.mesh):
            return jax.sharding.auto_axes(function, out_sharding=specs)(*arrays)

    return jax.jit(of)


def _in_blocks(x: jax.Array, count: int) -> jax.Array:
    """Cuts the last axis into a number of blocks of one length, the last filled up with zeros."""
    length = -(-x.shape[-1] // count)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * length - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], count, length)


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]
