"""float32 parameters and state for the optimizer of float16 parameters.

float16 is too narrow for an optimizer's state. Adam adds 0.001 g**2 to its second moment, which is
zero in float16 for gradients g below 5e-3, and steps grew to 25 times the learning rate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def float32_state(inner_state: Any, params: Any) -> Any:
    """Returns the state with its float16 leaves in float32 if a parameter is float16."""
    if not any(map(_is_float16, jax.tree.leaves(params))):
        return inner_state
    return jax.tree.map(_as_float32, inner_state)


def as_read_by(inner_state: Any, params: Any) -> Any:
    """Returns the parameters for the inner optimizer, with float16 leaves in float32.

    An optimizer that stores 16-bit weights itself gets them unchanged.
    """

    def stores(node: Any) -> bool:
        return getattr(node, "stores_16_bits", False)

    if any(map(stores, jax.tree.leaves(inner_state, is_leaf=stores))):
        return params
    return jax.tree.map(_as_float32, params)


def _is_float16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.float16


def _as_float32(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if _is_float16(leaf) else leaf
