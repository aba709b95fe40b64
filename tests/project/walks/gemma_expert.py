"""An expert with Gemma2-2B: two of its 26 layers, from shapes alone, in full size."""

import jax
import jax.numpy as jnp

from jmp_autocast import BF16, Policy, autocast, cast_params, explain, keep_less, quantize_params
from jmp_autocast.inspect import explain_kept

WIDTH, HIDDEN, HEADS, GROUPS, SIZE, TOKENS = 2304, 9216, 8, 4, 256, 256_128


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)


def rotated(x):
    position = jnp.arange(x.shape[1])[:, None]
    angle = position / 10_000 ** (jnp.arange(SIZE // 2) / (SIZE // 2))
    one, other = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def attention(p, x):
    q = rotated(jnp.einsum("btd,dhk->bthk", x, p["q"])) / SIZE**0.5
    k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in ("k", "v"))
    q = q.reshape(*q.shape[:2], GROUPS, -1, SIZE)
    scores = jnp.einsum("btghk,bsgk->bghts", q, rotated(k))
    scores = 50 * jnp.tanh(scores / 50)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("bghts,bsgk->btghk", jax.nn.softmax(scores), v)
    return jnp.einsum("bthk,hkd->btd", out.reshape(*q.shape[:2], HEADS, SIZE), p["o"])


def block(p, x):
    with jax.named_scope("attention"):
        x = x + norm(attention(p, norm(x, p["norm"][0])), p["norm"][1])
    with jax.named_scope("mlp"):
        h = norm(x, p["norm"][2])
        h = jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])
        return x + norm(h @ p["down"], p["norm"][3])


def model(params, tokens):
    x = params["embedding"][tokens] * WIDTH**0.5
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = block(layer, x)
    logits = norm(x, params["norm"]) @ params["embedding"].T
    return 30 * jnp.tanh(logits / 30)


def loss(params, tokens):
    log = jax.nn.log_softmax(model(params, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log, tokens[:, 1:, None], -1))


f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
layer = {
    "q": f32(WIDTH, HEADS, SIZE),
    "k": f32(WIDTH, GROUPS, SIZE),
    "v": f32(WIDTH, GROUPS, SIZE),
    "o": f32(HEADS, SIZE, WIDTH),
    "gate": f32(WIDTH, HIDDEN),
    "up": f32(WIDTH, HIDDEN),
    "down": f32(HIDDEN, WIDTH),
    "norm": f32(4, WIDTH),
}
params = {"embedding": f32(TOKENS, WIDTH), "layers": [layer] * 2, "norm": f32(WIDTH)}
tokens = jax.ShapeDtypeStruct((4, 513), jnp.int32)

report = explain(loss, params, tokens, policy=BF16)
print("in 16 bits:", f"{report.totals.low_share:.1%}")
report.to_html("gemma.html")
pinned = BF16.with_scopes({"*/mlp": "float32"})
print("pinned:", f"{explain(loss, params, tokens, policy=pinned).totals.low_share:.0%}")

kept = explain_kept(keep_less(autocast(loss, policy=BF16), residuals="recompute"), params, tokens)
print("recomputed keeps less:", "without residuals='recompute'" in str(kept))

bytes_of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
half = cast_params(model, params, tokens, policy=BF16)
print("layers in 16 bits:", f"{bytes_of(half['layers']) / bytes_of(params['layers']):.2f}")
float8 = Policy(jnp.bfloat16, matmul="float8")
eight = quantize_params(autocast(model, policy=float8), params, tokens)
print("layers in 8 bits:", f"{bytes_of(eight['layers']) / bytes_of(params['layers']):.2f}")
