"""The transformer block that the documentation explains: plain JAX in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# --- the program ---
Parameters = dict[str, Any]


def layer_norm(p: Parameters, x: jax.Array) -> jax.Array:
    """Normalizes the last axis."""
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    return centered * lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]


def attention(p: Parameters, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Masked attention with several heads."""
    q = jnp.einsum("btd,dhf->bhtf", x, p["q"])
    k = jnp.einsum("btd,dhf->bhtf", x, p["k"])
    v = jnp.einsum("btd,dhf->bhtf", x, p["v"])
    scores = jnp.einsum("bhtf,bhsf->bhts", q, k) / 4.0
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores)
    return jnp.einsum("bhts,bhsf,hfd->btd", probs, v, p["out"])


def mlp(p: Parameters, x: jax.Array) -> jax.Array:
    """Two dense layers with a GELU between them."""
    hidden = x @ p["up"] + p["up_bias"]
    return jax.nn.gelu(hidden) @ p["down"] + p["down_bias"]


def block(p: Parameters, x: jax.Array, mask: jax.Array) -> jax.Array:
    """One transformer block, with the norms first."""
    x = x + attention(p["attention"], layer_norm(p["norm1"], x), mask)
    return x + mlp(p["mlp"], layer_norm(p["norm2"], x))


# --- its arguments ---


def shapes() -> tuple[Parameters, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns shapes that stand for the arguments of `block`: width 64, 4 heads, 32 positions."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def norm() -> Parameters:
        return {"scale": array(64), "bias": array(64)}

    heads = {name: array(64, 4, 16) for name in ("q", "k", "v")}
    dense = {"up": array(64, 256), "up_bias": array(256)}
    dense |= {"down": array(256, 64), "down_bias": array(64)}
    parameters = {
        "norm1": norm(),
        "attention": heads | {"out": array(4, 16, 64)},
        "norm2": norm(),
        "mlp": dense,
    }
    return parameters, array(2, 32, 64), jax.ShapeDtypeStruct((32, 32), jnp.bool_)
