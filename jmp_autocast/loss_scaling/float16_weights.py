"""float16 parameters: float16 does not hold the state of an optimizer.

Adam adds 0.001 g**2 to its second moment, which is zero in float16 for gradients below 5e-3: steps
grew to 25 times the learning rate.
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
