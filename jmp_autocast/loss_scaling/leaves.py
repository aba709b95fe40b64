"""float16 and integer parameters, which an optimizer cannot update in their own dtypes.

float16 does not hold the state of an optimizer. Adam adds 0.001 g**2 to its second moment, which is
zero in float16 for gradients below 5e-3: steps grew to 25 times the learning rate. The gradient of
an integer parameter (``allow_int=True``) is float0, an array without content.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def float32_state(inner_state: Any, params: Any) -> Any:
    """Returns an optimizer's state with float32 in place of float16, if a weight is float16."""
    if not any(map(_is_float16, jax.tree.leaves(params))):
        return inner_state
    return jax.tree.map(_as_float32, inner_state)


def as_read_by(inner_state: Any, params: Any) -> Any:
    """Returns the weights for an optimizer: float32, unless it stores the 16-bit ones itself."""

    def stores(node: Any) -> bool:
        return getattr(node, "stores_16_bits", False)

    if any(map(stores, jax.tree.leaves(inner_state, is_leaf=stores))):
        return params
    return jax.tree.map(_as_float32, params)


def _is_float16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.float16


def _as_float32(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if _is_float16(leaf) else leaf


def is_float0(leaf: Any) -> bool:
    """True for the gradient of an integer or a bool."""
    return jax.dtypes.result_type(leaf) == jax.dtypes.float0


def as_zeros(grads: Any) -> Any:
    """Returns gradients for an optimizer: float32 zeros for float0, which no arithmetic takes."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.float32) if is_float0(leaf) else leaf, grads
    )


def without_integer_updates(updates: Any, grads: Any, params: Any) -> Any:
    """Returns updates that leave integer parameters unchanged, whatever the optimizer does.

    Weight decay would change them, and a float32 sum rounds integers above 2**24.

    Args:
        updates: The updates of the optimizer.
        grads: The gradients; those of integer leaves are float0.
        params: The parameters, or None.
    """
    if not any(map(is_float0, jax.tree.leaves(grads))):
        return updates
    typed = grads if params is None else params

    def update_of(leaf: Any, grad: Any, like: Any) -> Any:
        if not is_float0(grad):
            return leaf
        return jnp.zeros(grad.shape, jnp.int32 if params is None else jnp.result_type(like))

    return jax.tree.map(update_of, updates, grads, typed)
