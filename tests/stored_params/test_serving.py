"""A model is served: stored small, exported, and decoded in a process without the model's code."""

import json
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jmp_autocast import BF16, Float8, Policy, autocast, cast_params
from jmp_autocast.optimizers import as_float32
from jmp_autocast.quantize_params import QuantizedArray, quantize_params
from tests.support.numerics import normal

FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, skip=(), emulate=True))
WIDTH, LENGTH, TOKENS, LAYERS, STEPS = 32, 8, 48, 2, 6

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def attended(q, keys, values, position):
    scores = jnp.einsum("bd,bnd->bn", q, keys) / WIDTH**0.5
    scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -jnp.inf)
    return jnp.einsum("bn,bnd->bd", jax.nn.softmax(scores), values)


def written(old, new, position):
    return lax.dynamic_update_slice(old, new[:, None].astype(old.dtype), (0, position, 0))


def decode(params, cache, token, position):
    def layer(x, parts):
        w, old = parts
        q, k, v = (x @ w[name] for name in "qkv")
        new = {"k": written(old["k"], k, position), "v": written(old["v"], v, position)}
        return x + attended(q, new["k"], new["v"], position) @ w["o"], new

    x, cache = lax.scan(layer, params["embedding"][token], (params["layers"], cache))
    return x @ params["head"], cache


SHAPE = (LAYERS, WIDTH, WIDTH)
PARAMS = {
    "embedding": normal(0, e=(TOKENS, WIDTH))["e"],
    "layers": {n: x / 6 for n, x in normal(1, q=SHAPE, k=SHAPE, v=SHAPE, o=SHAPE).items()},
    "head": normal(2, h=(WIDTH, TOKENS))["h"] / 6,
}


def empty(batch):
    return {name: jnp.zeros((LAYERS, batch, LENGTH, WIDTH), jnp.bfloat16) for name in "kv"}


def served(tools, policy, batch):
    """A step, and what it is called with: the stored parameters and an empty cache."""
    low = autocast(decode, policy=policy)
    params, args = PARAMS, (empty(batch), jnp.zeros(batch, int), 0)
    for tool in tools:
        params = tool(low, params, *args)
    step = lambda params, cache, token, position: low(as_float32(params), cache, token, position)
    return step, params, empty(batch)


# The tools that store the parameters, the policy, and how many arrays are stored in 8 bits.
SERVED = {
    "bfloat16": ((cast_params,), BF16, 0),
    "float8": ((quantize_params, cast_params), FP8, 5),
}

# What a server runs: JAX and jmp_autocast, and no code of the model.
SERVER = """
import json, pickle, sys
import jax, jax.numpy as jnp
import jmp_autocast

folder, steps = sys.argv[1], int(sys.argv[2])
found = {}
for name in json.loads(sys.argv[3]):
    model = jax.export.deserialize(bytearray(open(f"{folder}/{name}.bin", "rb").read()))
    params, cache, token = pickle.load(open(f"{folder}/{name}.pickle", "rb"))
    tokens = []
    for position in range(steps):
        logits, cache = model.call(params, cache, token, position)
        token = jnp.argmax(logits, -1).astype(token.dtype)
        tokens.append(token.tolist())
    found[name] = tokens
print(json.dumps([found, sorted({"flax", "orbax"} & {m.partition(".")[0] for m in sys.modules})]))
"""


def tokens_of(step, params, cache, token):
    tokens = []
    for position in range(STEPS):
        logits, cache = step(params, cache, token, position)
        token = jnp.argmax(logits, -1).astype(token.dtype)
        tokens.append(token.tolist())
    return tokens


@pytest.mark.slow
@pytest.mark.process
def test_another_process_decodes_the_same_tokens(tmp_path):
    expected, token = {}, jnp.array([3], jnp.int32)
    for name, (tools, policy, count) in SERVED.items():
        step, params, cache = served(tools, policy, batch=1)
        is_quantized = lambda x: isinstance(x, QuantizedArray)
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        assert sum(map(is_quantized, leaves)) == count
        exported = export.export(jax.jit(step))(params, cache, token, 0)
        (tmp_path / f"{name}.bin").write_bytes(exported.serialize())
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps((params, cache, token)))
        expected[name] = tokens_of(jax.jit(step), params, cache, token)
        assert len({t for (t,) in expected[name]}) > 1
    command = [sys.executable, "-c", SERVER, str(tmp_path), str(STEPS), json.dumps(list(SERVED))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == [expected, []]


def test_one_export_serves_any_batch():
    step, params, _ = served((quantize_params,), FP8, batch=1)
    (batch,) = export.symbolic_shape("batch")
    cache = {
        name: jax.ShapeDtypeStruct((LAYERS, batch, LENGTH, WIDTH), jnp.bfloat16) for name in "kv"
    }
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    exported = export.export(jax.jit(step))(params, cache, token, 0)
    model = export.deserialize(exported.serialize())
    for count in (1, 5):
        args = params, empty(count), jnp.arange(count, dtype=jnp.int32), 0
        logits, expected = (fn(*args)[0] for fn in (model.call, jax.jit(step)))
        np.testing.assert_allclose(logits, expected, rtol=2**-6, atol=2**-6)
