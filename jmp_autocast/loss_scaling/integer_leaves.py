"""Gradients of integer leaves: ``allow_int=True`` makes float0 of them, which nothing can add."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_float0(leaf: Any) -> bool:
    """True for the gradient of an integer or a bool: an array without content."""
    return jax.dtypes.result_type(leaf) == jax.dtypes.float0


def as_zeros(grads: Any) -> Any:
    """Returns gradients for an optimizer: float32 zeros for float0, which no arithmetic takes."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.float32) if is_float0(leaf) else leaf, grads
    )


def without_integer_updates(updates: Any, grads: Any, params: Any) -> Any:
    """Returns updates that leave integer parameters as they are, whatever the optimizer does.

    Weight decay would move them, and a float32 sum rounds integers above 2**24.

    Args:
        updates: What the optimizer returned.
        grads: The gradients; those of integer leaves are float0.
        params: The parameters, None where they were not handed over.
    """
    if not any(map(is_float0, jax.tree.leaves(grads))):
        return updates
    typed = grads if params is None else params

    def update_of(leaf: Any, grad: Any, like: Any) -> Any:
        if not is_float0(grad):
            return leaf
        return jnp.zeros(grad.shape, jnp.int32 if params is None else jnp.result_type(like))

    return jax.tree.map(update_of, updates, grads, typed)
