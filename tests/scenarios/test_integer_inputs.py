"""Programs that read integers (masks, packed weights): their matmuls run low.

A guard on coordinates once kept 5 to 100 % of the matmul FLOPs of such programs in float32, without
a word; ``plan/test_guards.py`` has each form of an integer.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, explain

B, T, D, H = 2, 32, 64, 4


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


W = {name: f32(D, D) for name in ("q", "k", "v", "o", "up", "down")}
BATCH = f32(B, T, D), i32(B, T)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def heads(x):
    return x.reshape(*x.shape[:-1], H, D // H)


def attention(w, x, bias):
    q, k, v = (heads(x @ w[name]) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (D // H) ** 0.5 + bias
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return out.reshape(x.shape) @ w["o"]


def layers(w, x, bias, keep=1.0):
    for _ in range(2):
        x = x + attention(w, norm(x), bias) * keep
        x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"] * keep
    return x


def bert(w, x, mask):
    """The extended mask of Hugging Face, and a mean over the tokens that are there."""
    bias = (1.0 - mask[:, None, None, :].astype(jnp.float32)) * jnp.finfo(jnp.float32).min
    x = layers(w, x, bias)
    pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return jnp.tanh(pooled @ w["o"])


def gptq(w, x, packed):
    """Eight weights of 4 bits in one int32, with scales and zero points of groups."""
    shifts = jnp.arange(8, dtype=jnp.int32) * 4
    codes = (packed[..., None] >> shifts) & 15
    weight = (codes.reshape(D, D) - 8).astype(jnp.float32) * w["up"][:1]
    return jax.nn.silu(x @ weight) @ w["down"]


PROGRAMS = {
    "bert": (bert, BATCH),
    "gptq": (gptq, (BATCH[0], i32(D, D // 8))),
}


def share_in_16_bits(fn, args, policy):
    """The share of the FLOPs of products that sum something, and those that are float32."""
    with jax.numpy_dtype_promotion("standard"):  # a float times an integer mask
        rows = explain(fn, W, *args, policy=policy).rows
    # The gradient of a vector times a matrix is an outer product: one of elements.
    depth = lambda row: row.flops // (2 * row.times * math.prod(row.result_shapes[0]))
    products = [row for row in rows if row.primitive == "dot_general" and depth(row) > 1]
    full = [row for row in products if "float32" in row.operands]
    kept = sum(row.flops for row in full) / sum(row.flops for row in products)
    return 1 - kept, [(row.source, row.reason, row.cause) for row in full]


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_matmuls_of_programs_with_integers_are_low(name, policy):
    share, full = share_in_16_bits(*PROGRAMS[name], policy)
    assert share >= 0.99, full


def test_so_are_those_of_a_gradient():
    fn, args = PROGRAMS["bert"]
    loss = lambda w, *args: jnp.sum(jnp.square(fn(w, *args)))
    share, full = share_in_16_bits(jax.grad(loss), args, BF16)
    assert share >= 0.99, full
