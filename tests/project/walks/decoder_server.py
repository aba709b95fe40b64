"""A server of a decoder: a cache in 16 bits, weights in 8, exported, and decoded elsewhere."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jmp_autocast import Float8, Policy, autocast, cast_params, quantize_params
from jmp_autocast.optimizers import as_float32

WIDTH, TOKENS, LENGTH = 64, 96, 8


def decode(params, cache, token, position):
    x = params["embedding"][token]
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    cache = {
        name: jax.lax.dynamic_update_slice(
            cache[name], new[:, None].astype(cache[name].dtype), (0, position, 0)
        )
        for name, new in (("keys", k), ("values", v))
    }
    scores = jnp.einsum("bd,bnd->bn", q, cache["keys"]) / WIDTH**0.5
    scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -jnp.inf)
    x = x + jnp.einsum("bn,bnd->bd", jax.nn.softmax(scores), cache["values"]) @ params["o"]
    return x @ params["head"], cache


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[-2] ** 0.5


params = {name: random(i, WIDTH, WIDTH) / 2 for i, name in enumerate("qkvo")}
params |= {"embedding": 8 * random(4, TOKENS, WIDTH), "head": random(5, WIDTH, TOKENS)}


def empty(batch, dtype=jnp.bfloat16):
    return {name: jnp.zeros((batch, LENGTH, WIDTH), dtype) for name in ("keys", "values")}


# Quantized for a batch of 1, and for any other; the rest in 16 bits.
policy = Policy(jnp.bfloat16, matmul=Float8(minimum=64, emulate=True))
low = autocast(decode, policy=policy)
arguments = empty(1), jnp.zeros(1, jnp.int32), 0
small = quantize_params(low, params, *arguments, check=True)
small = cast_params(low, small, *arguments, check=True)
size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
print("a third of the bytes:", size(small) < size(params) / 2)

step = jax.jit(lambda params, *rest: low(as_float32(params), *rest), donate_argnums=1)


def decoded(step, params, cache):
    token, tokens = jnp.array([3, 7], jnp.int32), []
    for position in range(LENGTH):
        logits, cache = step(params, cache, token, position)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        tokens.append(token.tolist())
    return tokens


tokens = decoded(step, small, empty(2))
print("tokens of float32:", tokens == decoded(jax.jit(decode), params, empty(2, jnp.float32)))

(batch,) = export.symbolic_shape("batch")
shapes = jax.tree.map(
    lambda x: x.update(shape=(batch, *x.shape[1:])), jax.eval_shape(lambda: arguments[:2])
)
exported = export.export(step, platforms=["cpu", "cuda"])(small, *shapes, 0)
pathlib.Path("decoder.bin").write_bytes(exported.serialize())
pairs = jax.tree.leaves_with_path(small)
raw = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in pairs}
np.savez("decoder.npz", **{name: x.view(f"u{x.itemsize}") for name, x in raw.items()})

server = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jmp_autocast

model = jax.export.deserialize(bytearray(open("decoder.bin", "rb").read()))
raw = np.load("decoder.npz")
params = [raw[name].view(aval.dtype) for name, aval in zip(raw.files, model.in_avals)]
rest = model.in_avals[len(params) :]
sizes = [[2 if jax.export.is_symbolic_dim(n) else n for n in aval.shape] for aval in rest]
leaves = params + [jnp.zeros(size, aval.dtype) for size, aval in zip(sizes, rest)]
(params, cache, *_), _ = jax.tree.unflatten(model.in_tree, leaves)
token, tokens = jnp.array([3, 7], jnp.int32), []
for position in range(8):
    logits, cache = model.call(params, cache, token, position)
    token = jnp.argmax(logits, -1).astype(jnp.int32)
    tokens.append(token.tolist())
print(tokens)
"""
run = subprocess.run([sys.executable, "-c", server], capture_output=True, text=True, check=True)
print("same tokens elsewhere:", run.stdout.strip() == str(tokens))
