"""An optax transformation that stores the moments of any optimizer in few bits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .blocks import Compressed, dequantized, quantized
from .rounding import stochastically
from .storing import check_transformation
from .weights import WIDE_READERS, check_seed, first_key, split_key

_BFLOAT16 = jnp.dtype(jnp.bfloat16)


class CompressedMomentsState(NamedTuple):
    """State of `compressed_moments`.

    Attributes:
        key: The PRNG key of the next step: the data of a threefry key, ``uint32[2]``.
        inner_state: The state of the inner transformation, its large float32 arrays as
            `Compressed`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import compressed_moments
        >>> state = compressed_moments(optax.adam(1e-3)).init(jnp.ones((64, 128)))
        >>> state.inner_state[0].nu.values.dtype
        dtype('uint8')
    """

    key: jax.Array
    inner_state: optax.OptState


def compressed_moments(
    inner: optax.GradientTransformation,
    *,
    bits: Literal[8, 16] = 8,
    block_size: int = 64,
    min_size: int = 4096,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its moments take 1 or 2 bytes per element instead of 4.

    Each ``update`` widens the state, runs ``inner`` in float32 and rounds the new state at random,
    so that its mean is exact. Rounding to the nearest would stop a second moment: with a decay of
    0.999 it changes by a thousandth in each step, and half of the distance between bfloat16 numbers
    is two thousandths.

    With 16 bits, arrays are bfloat16. With 8 bits, each block along the last axis has a float32
    scale, and codes of square roots: `blocks` has the details. The noise of 8 bits adds up over as
    many steps as a moment remembers: a second moment tolerates it better with a decay of 0.95 or
    0.99 than with 0.999.

    Wrap the optimizer itself, inside `master_weights`, ``optax.MultiSteps`` and
    `jmp_autocast.dynamic_loss_scaling`: all large float32 arrays of its state are rounded.

    Args:
        inner: Any optax transformation. Only float32 arrays of its state are stored otherwise.
        bits: 8 or 16.
        block_size: Elements that share a scale, at most; 64 take 1.06 bytes each.
        min_size: Arrays with fewer elements stay float32.
        seed: The first PRNG key.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with a `CompressedMomentsState`.

    Raises:
        TypeError: ``inner`` is not a gradient transformation, or another argument is not an
            integer. At ``update``: the state is that of another transformation.
        ValueError: ``bits`` is neither 8 nor 16, or a size is below 1. At ``init``: ``inner`` keeps
            weights in 16 bits.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import compressed_moments
        >>> params = jnp.ones((64, 128))
        >>> for tx in (optax.adam(1e-3), compressed_moments(optax.adam(1e-3))):
        ...     nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(params)))
        ...     print(round(nbytes / params.size, 2))
        8.0
        2.13
    """
    check_transformation("compressed_moments", inner)
    _check_sizes(bits=bits, block_size=block_size, min_size=min_size)
    check_seed("compressed_moments", seed)
    inner = optax.with_extra_args_support(inner)

    def compress(key: jax.Array, state: Any) -> CompressedMomentsState:
        key, keys = split_key(key, state)

        def of(own: jax.Array, x: Any) -> Any:
            if getattr(x, "dtype", None) != jnp.float32 or x.ndim == 0 or x.size < min_size:
                return x
            if bits == 16:
                return Compressed(stochastically(own, x, _BFLOAT16).astype(_BFLOAT16), None)
            return quantized(own, x, block_size)

        return CompressedMomentsState(key, jax.tree.map(of, keys, state))

    def init(params: optax.Params) -> CompressedMomentsState:
        state = inner.init(params)
        _check_order(state)
        return compress(first_key(seed), state)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, CompressedMomentsState]:
        if not isinstance(state, CompressedMomentsState):
            raise TypeError(
                "The state that compressed_moments updates must be a CompressedMomentsState, from "
                f"its init or its last update; got {type(state).__name__}."
            )
        wide = jax.tree.map(_wide, state.inner_state, is_leaf=_is_compressed)
        updates, new = inner.update(updates, wide, params, **extra_args)
        return updates, compress(state.key, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_compressed(node: Any) -> bool:
    return isinstance(node, Compressed)


def _wide(node: Any) -> Any:
    if not _is_compressed(node):
        return node
    return node.values.astype(jnp.float32) if node.scales is None else dequantized(node)


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if sizes["bits"] not in (8, 16):
        raise ValueError(f"bits must be 8 or 16, got {sizes['bits']}.")


def _check_order(state: Any) -> None:
    """Raises ValueError where the digits of weights would be rounded away."""
    kinds = tuple(WIDE_READERS)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(node, kinds):
            raise ValueError(
                f"compressed_moments must not round the weights in {type(node).__name__}. Put it "
                "inside: master_weights(compressed_moments(optax.adam(1e-3)))."
            )
