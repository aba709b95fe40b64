"""An optax transformation that stores the moments of any optimizer in few bits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .blocks import Compressed, dequantized, quantized
from .named_axes import is_variable, lie_as_they_divide
from .rounding import stochastically
from .storing import check_transformation
from .weights import WIDE_READERS, check_seed, first_key, split_key

_BFLOAT16 = jnp.dtype(jnp.bfloat16)


class CompressedMomentsState(NamedTuple):
    """State of `compressed_moments`.

    Attributes:
        key: The PRNG key of the next step: the data of a threefry key, ``uint32[2]``.
        inner_state: The state of the inner transformation. Its large float32 arrays are bfloat16,
            or codes: uint8, in the array's own shape, so that its sharding fits.
        scales: In the structure of ``inner_state``: for codes the largest magnitude of each block
            along the last axis, float32, negative where all elements of the block are at least 0.
            A zero for other arrays, in bfloat16 for those that are stored so. Where the last axis
            is split over devices, the blocks are too, if their number divides.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import compressed_moments
        >>> state = compressed_moments(optax.adam(1e-3)).init(jnp.ones((64, 128)))
        >>> codes, scales = state.inner_state[0].nu, state.scales[0].nu
        >>> codes.shape, codes.dtype, scales.shape
        ((64, 128), dtype('uint8'), (64, 2))
    """

    key: jax.Array
    inner_state: optax.OptState
    scales: Any


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

    def scales_of(x: Any) -> jax.Array:
        if getattr(x, "dtype", None) != jnp.float32 or x.ndim == 0 or x.size < min_size:
            return jnp.zeros(())
        return jnp.zeros((), _BFLOAT16) if bits == 16 else jnp.zeros(1)

    def compress(key: jax.Array, state: Any, before: Any) -> CompressedMomentsState:
        key, keys = split_key(key, state)

        def of(own: jax.Array, x: Any, scales: jax.Array) -> Compressed:
            if scales.ndim:
                return quantized(own, x, block_size)
            if scales.dtype == _BFLOAT16:
                x = stochastically(own, x, _BFLOAT16).astype(_BFLOAT16)
            # As it was, so that a step which donates the state writes it in its own place.
            return Compressed(x, scales)

        # Two trees of arrays: a variable of Flax NNX takes an array, and no pair of them. Those of
        # scales may name other axes.
        leaves, structure = jax.tree.flatten(state)
        scales, structure_of_scales = jax.tree.flatten(before)
        columns = structure.flatten_up_to(keys), leaves, scales
        made = [of(*row) for row in zip(*columns, strict=True)]
        values, scales = ([getattr(x, name) for x in made] for name in Compressed._fields)
        return CompressedMomentsState(
            key, structure.unflatten(values), structure_of_scales.unflatten(scales)
        )

    def init(params: optax.Params) -> CompressedMomentsState:
        state = inner.init(params)
        _check_order(state)
        state = compress(first_key(seed), state, jax.tree.map(scales_of, state))
        for node in jax.tree.leaves(state.scales, is_leaf=is_variable):
            lie_as_they_divide(node)
        return state

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, CompressedMomentsState]:
        if not isinstance(state, CompressedMomentsState):
            raise TypeError(
                "The state that compressed_moments updates must be a CompressedMomentsState, from "
                f"its init or its last update; got {type(state).__name__}."
            )
        leaves, structure = jax.tree.flatten(state.inner_state)
        wide = map(_wide, leaves, jax.tree.leaves(state.scales))
        updates, new = inner.update(updates, structure.unflatten(wide), params, **extra_args)
        return updates, compress(state.key, new, state.scales)

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(values: Any, scales: jax.Array) -> Any:
    if scales.ndim:
        return dequantized(Compressed(values, scales))
    return values.astype(jnp.float32) if scales.dtype == _BFLOAT16 else values


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
