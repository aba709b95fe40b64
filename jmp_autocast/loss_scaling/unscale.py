"""Divides gradients by the loss scale, and checks that the results are finite."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .check_arguments import LARGEST_SCALE, SMALLEST_SCALE

AxisName = Hashable | tuple[Hashable, ...] | None


def all_finite(scale: jax.Array, grads: Any, axis_name: AxisName) -> jax.Array:
    """Returns whether the scale is valid and all gradients, divided by it, are finite.

    The quotients are checked, because the division of a finite gradient may overflow.

    Args:
        scale: float32 scalar.
        grads: A pytree of arrays; leaves that are neither floating nor complex are not checked.
        axis_name: Mapped axis or axes, over which the result is True only if it is True on all
            shards.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads) if is_inexact(leaf)]
    finite = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
    for leaf in leaves:
        # The sum of a leaf times zero is NaN if any number is infinite or NaN, else 0. It reads the
        # leaf once and writes a scalar, while jnp.isfinite would write an array of bools.
        finite &= jnp.sum(_unscaled_leaf(leaf, scale) * 0) == 0
    if axis_name is not None:
        # The minimum stands for a logical "and", for which there is no collective.
        finite = lax.pmin(finite.astype(jnp.int32), axis_name) > 0
    return finite


def unscale(scale: jax.Array, grads: Any) -> Any:
    """Divides floating and complex leaves by the scale, in float32 or wider."""
    return jax.tree.map(lambda leaf: _unscaled_leaf(leaf, scale), grads)


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf is floating or complex, so that a scale applies to it."""
    return jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact)


def _unscaled_leaf(leaf: Any, scale: jax.Array) -> Any:
    if not is_inexact(leaf):
        return leaf
    wide = at_least_float32(jnp.asarray(leaf))
    return wide / scale.astype(wide.dtype)


def at_least_float32(leaf: jax.Array) -> jax.Array:
    """Returns a floating or complex leaf, cast to float32 if it is narrower."""
    # jnp.promote_types cannot find the dtype: it raises for float8 dtypes.
    return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.float32)
