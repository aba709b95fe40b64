"""Dense layers in plain JAX; ``dtype`` is threaded through by hand, None computes as given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def to(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts an array to a compute dtype, if there is one."""
    return x if dtype is None else x.astype(dtype)


def dense_params(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Returns the parameters of a dense layer."""
    kernel = jax.nn.initializers.lecun_normal()(key, (inputs, outputs))
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def dense(params: dict[str, jax.Array], x: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns ``x @ kernel + bias`` in the compute dtype."""
    return to(x, dtype) @ to(params["kernel"], dtype) + to(params["bias"], dtype)


def mlp_params(key: jax.Array, sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    """Returns the parameters of dense layers between these widths."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [dense_params(*it) for it in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def mlp(
    params: Sequence[dict[str, jax.Array]],
    x: jax.Array,
    dtype: Any = None,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
) -> jax.Array:
    """Returns the last layer's output in the compute dtype, without an activation."""
    for layer in params[:-1]:
        x = activation(dense(layer, x, dtype))
    return dense(params[-1], x, dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy, computed in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
