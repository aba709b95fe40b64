"""Programs that read integers (masks, labels, packed weights, time grids): their matmuls run low.

Small versions of what other packages do. A guard on coordinates once kept 5 to 100 % of the matmul
FLOPs of each in float32, without a word.
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


def big_bird(w, x, mask):
    """Products of block masks multiply the scores and the attention itself."""
    blocks = mask.reshape(B, T // 16, 16)
    band = jnp.einsum("blq,blk->blqk", blocks, blocks).astype(jnp.float32)
    q, k, v = ((x @ w[n]).reshape(B, T // 16, 16, D) for n in "qkv")
    scores = jnp.einsum("blqd,blkd->blqk", q, k) * band + (1.0 - band) * -10000.0
    out = jnp.einsum("blqk,blkd->blqd", jax.nn.softmax(scores) * band, v)
    return layers(w, out.reshape(x.shape) * mask[..., None], 0.0)


def gptq(w, x, packed):
    """Eight weights of 4 bits in one int32, with scales and zero points of groups."""
    shifts = jnp.arange(8, dtype=jnp.int32) * 4
    codes = (packed[..., None] >> shifts) & 15
    weight = (codes.reshape(D, D) - 8).astype(jnp.float32) * w["up"][:1]
    return jax.nn.silu(x @ weight) @ w["down"]


def whole_weights(w, x, q):
    return (x @ (q.astype(jnp.float32) * w["up"])) @ w["down"]


def rwkv7(w, x, mask):
    """A generalized delta rule whose state is reset by an integer mask."""
    keep = mask.astype(jnp.float32)[..., None]
    x = x * keep
    shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] * keep
    r, k, v = (heads((x + (shifted - x) * w["down"][0]) @ w[n]) for n in "qkv")
    decay = heads(jnp.exp(-jnp.exp(-0.5 - jax.nn.softplus(-(x @ w["up"]))))) * keep[..., None]
    rate = heads(jax.nn.sigmoid(x @ w["down"])) * keep[..., None]

    def step(state, row):
        r, k, v, d, a = row
        removed = jnp.einsum("bhij,bhj->bhi", state, k)
        state = state * d[:, :, None] - removed[..., None] * (k * a)[:, :, None]
        state = state + v[..., None] * k[:, :, None]
        return state, jnp.einsum("bhij,bhj->bhi", state, r)

    rows = [jnp.moveaxis(a, 1, 0) for a in (r, k, v, decay, rate)]
    out = lax.scan(step, jnp.zeros((B, H, D // H, D // H)), tuple(rows))[1]
    return jnp.moveaxis(out, 0, 1).reshape(x.shape) @ w["o"]


def hamiltonian(w, x, labels):
    """Leapfrog steps on the posterior of a network with integer labels."""
    y = labels[:, 0]

    def energy(w):
        h = jnp.tanh(x.reshape(B, -1)[:, :D] @ w["up"])
        logit = (h @ w["down"])[:, 0]
        prior = sum(jnp.sum(v**2) for v in w.values())
        return prior - jnp.sum(y * jax.nn.log_sigmoid(logit) + (1 - y) * jax.nn.log_sigmoid(-logit))

    momentum = jax.tree.map(jnp.ones_like, w)
    for _ in range(2):
        momentum = jax.tree.map(lambda p, g: p - 0.05 * g, momentum, jax.grad(energy)(w))
        w = jax.tree.map(lambda v, p: v + 0.1 * p, w, momentum)
    return energy(w)


def stochastic(w, x, times):
    """A neural SDE that is given the time itself as a feature."""
    ts = times.astype(jnp.float32)[0]

    def step(z, t):
        z_t = jnp.concatenate([z, jnp.full((B, 1), t)], -1)
        drift = jnp.tanh(z_t @ jnp.concatenate([w["up"], w["q"][:1]])) @ w["down"]
        noise = jax.nn.sigmoid(z_t @ jnp.concatenate([w["k"], w["v"][:1]]))
        return z + 0.1 * drift + 0.3 * noise, None

    return lax.scan(step, x[:, 0], ts)[0] @ w["o"]


def rigid_bodies(w, x, types):
    """Joint types select transforms of 6 x 6 by integers; a network gives the torques."""
    kinds = jnp.eye(6)[None] * types[:, :6, None].astype(jnp.float32)
    inertia = x[:, :6, :6]
    for _ in range(2):
        inertia = jnp.einsum("bij,bjk,blk->bil", kinds, inertia, kinds)
    torque = jax.nn.relu(inertia.reshape(B, 36) @ w["up"][:36]) @ w["down"]
    return torque @ w["o"]


PROGRAMS = {
    "bert": (bert, BATCH),
    "big_bird": (big_bird, BATCH),
    "gptq": (gptq, (BATCH[0], i32(D, D // 8))),
    "int32_weights": (whole_weights, (BATCH[0], i32(D, D))),
    "rwkv7": (rwkv7, BATCH),
    "hamiltonian": (hamiltonian, BATCH),
    "neural_sde": (stochastic, BATCH),
    "rigid_bodies": (rigid_bodies, BATCH),
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


@pytest.mark.parametrize("name", ["bert", "big_bird", "rwkv7", "hamiltonian", "neural_sde"])
def test_so_are_those_of_their_gradients(name):
    fn, args = PROGRAMS[name]
    loss = lambda w, *args: jnp.sum(jnp.square(fn(w, *args)))
    share, full = share_in_16_bits(jax.grad(loss), args, BF16)
    assert share >= 0.99, full
