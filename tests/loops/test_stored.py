"""What a policy stores in 16 bits: caches in loops, as arguments and results, in modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jmp_autocast import BF16, autocast, explain, full_precision
from jmp_autocast.integrations.nnx import autocast as nnx_autocast
from tests.support.jaxprs import equations, find, trace

W = {"k": jnp.eye(8) * 0.5, "out": jnp.eye(8) + 0.1}
X, CACHE = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8), jnp.zeros((8, 2, 8))
low = BF16.with_storage("*cache*")


def attend(w, x, cache, i, write):
    """One step of a decoder: writes what it makes of ``x``, and reads all that is there."""
    cache = write(cache, (x @ w["k"])[None] * jnp.cos(x), i)
    scores = jnp.einsum("bd,tbd->bt", x, cache)
    return jnp.einsum("bt,tbd->bd", jax.nn.softmax(scores), cache) @ w["out"], cache


WRITES = {
    "dynamic_update_slice": lambda c, x, i: lax.dynamic_update_slice(c, x, (i, 0, 0)),
    "scatter": lambda c, x, i: c.at[i].set(x[0]),
    "select": lambda c, x, i: jnp.where((jnp.arange(8) == i)[:, None, None], x, c),
    "flat": lambda c, x, i: lax.dynamic_update_slice(c.reshape(16, 8), x[0], (2 * i, 0)).reshape(
        8, 2, 8
    ),
    "cond": lambda c, x, i: lax.cond(
        i < 8, lambda: lax.dynamic_update_slice(c, x, (i, 0, 0)), lambda: c
    ),
}
write_slice = WRITES["dynamic_update_slice"]


def is_narrow(jaxpr, shape=CACHE.shape):
    """Whether no array of a cache's shape is float32."""
    # What is broadcast is computed where it is read.
    made = [e for e in equations(jaxpr) if e.primitive.name != "broadcast_in_dim"]
    kinds = {v.aval.dtype.name for e in made for v in e.outvars if v.aval.shape == shape}
    return kinds <= {"bfloat16", "bool", "int32"} and "bfloat16" in kinds


# --- loops ------------------------------------------------------------------------------------


def in_a_while(w, x):
    def body(state):
        y, cache = attend(w, state["x"], state["cache"], state["i"], write_slice)
        return {"i": state["i"] + 1, "cache": cache, "x": y}

    start = {"i": 0, "cache": CACHE, "x": x}
    return lax.while_loop(lambda state: state["i"] < 8, body, start)["x"]


def in_a_scan(w, x):
    def body(state, i):
        y, cache = attend(w, state["x"], state["cache"], i, write_slice)
        return {"cache": cache, "x": y}, y

    return lax.scan(body, {"cache": CACHE, "x": x}, jnp.arange(6))[1]


def over_layers(w, x):
    """A loop of tokens, of which each goes through a scan over layers with a cache for each."""

    def layer(i, x, slices):
        w, cache = slices
        return attend(w, x, cache, i, write_slice)

    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), w)

    def token(i, state):
        x, caches = lax.scan(lambda x, s: layer(i, x, s), state["x"], (stacked, state["cache"]))
        return {"x": x, "cache": caches}

    start = {"x": x, "cache": jnp.zeros((2, *CACHE.shape))}
    return lax.fori_loop(0, jnp.int32(8), token, start)["x"]


LOOPS = {"while": in_a_while, "scan": in_a_scan, "layers": over_layers}


@pytest.mark.parametrize("fn", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("level", ["o1", "compute"])
def test_a_loop_carries_its_cache_in_16_bits(fn, level):
    cast = autocast(fn, policy=low.with_level(level))
    loop = find(trace(cast, W, X), "while", "scan")[0]
    shapes = CACHE.shape, (2, *CACHE.shape)
    assert {v.aval.dtype.name for v in loop.outvars if v.aval.shape in shapes} == {"bfloat16"}
    assert is_narrow(trace(cast, W, X))
    got, want = jax.jit(lambda *a: (cast(*a), fn(*a)))(W, X)
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02)


def test_a_carry_that_nobody_names_keeps_its_dtype():
    policy = low.with_storage({"state/cache": "declared"})
    for chosen in (BF16, policy):
        loop = find(trace(autocast(in_a_while, policy=chosen), W, X), "while")[0]
        assert [v.aval.dtype.name for v in loop.outvars if v.aval.ndim == 3] == ["float32"]


# --- arguments and results ------------------------------------------------------------------------


def step(params, cache, x, i, write=write_slice):
    return attend(params, x, cache["layer"], i, write)


ROWS = [(name, "cache") for name in WRITES]
ROWS += [("dynamic_update_slice", pattern) for pattern in ("1", "*/layer", "1/layer")]


@pytest.mark.parametrize(("name", "pattern"), ROWS)
def test_a_cache_in_16_bits_goes_through_a_float32_model(name, pattern):
    def fn(params, cache, x, i):
        return step(params, cache, x, i, WRITES[name])

    given = {"layer": CACHE.astype(jnp.bfloat16)}
    cast = autocast(fn, policy=BF16.with_storage(pattern))
    y, cache = jax.eval_shape(cast, W, given, X, 3)
    assert (y.dtype, cache.dtype) == (jnp.float32, jnp.bfloat16)
    assert is_narrow(trace(cast, W, given, X, jnp.int32(3)))


def test_a_decoding_loop_outside_gets_back_what_it_gives():
    cast = autocast(step, policy=low)

    def decode(cast, w, x, dtype):
        def body(state, i):
            y, cache = cast(w, {"layer": state[1]}, state[0], i)
            return (y, cache), y

        return lax.scan(body, (x, CACHE.astype(dtype)), jnp.arange(8))

    (_, cache), got = decode(cast, W, X, jnp.bfloat16)
    assert cache.dtype == jnp.bfloat16
    np.testing.assert_allclose(got, decode(step, W, X, jnp.float32)[1], rtol=0.05, atol=0.02)


def test_what_is_given_in_float32_is_rounded_and_stored():
    cast = autocast(step, policy=low)
    assert jax.eval_shape(cast, W, {"layer": CACHE}, X, 3)[1].dtype == jnp.bfloat16


def test_results_by_their_path():
    def stage(w, x):
        return {"hidden": jnp.tanh(x @ w["k"]), "loss": jnp.sum(x)}

    out = jax.eval_shape(autocast(stage, policy=BF16.with_storage("result/hidden")), W, X)
    assert {k: v.dtype.name for k, v in out.items()} == {"hidden": "bfloat16", "loss": "float32"}


def test_gradients_of_stored_activations():
    def loss(w, hidden):
        return jnp.sum(jnp.tanh(hidden @ w["k"]) ** 2)

    stored = X.astype(jnp.bfloat16)
    cast = autocast(loss, policy=BF16.with_storage("hidden"))
    w, hidden = jax.grad(cast, argnums=(0, 1))(W, stored)
    assert (w["k"].dtype, hidden.dtype) == (jnp.float32, jnp.bfloat16)
    want = jax.grad(loss, argnums=1)(W, X)
    np.testing.assert_allclose(hidden.astype(jnp.float32), want, rtol=0.05, atol=0.02)


def test_a_scope_in_float32_reads_a_stored_cache():
    def fn(params, cache, x, i):
        with full_precision():
            return step(params, cache, x, i)

    given = {"layer": CACHE.astype(jnp.bfloat16)}
    jaxpr = trace(autocast(fn, policy=low), W, given, X, jnp.int32(3))
    assert {e.invars[0].aval.dtype.name for e in find(jaxpr, "dot_general")} == {"float32"}
    assert jaxpr.out_avals[1].dtype == jnp.bfloat16


# --- modules ----------------------------------------------------------------------------------


class Decoder(nnx.Module):
    def __init__(self, dtype):
        self.w = nnx.Param(W["k"])
        self.cache, self.i = nnx.Cache(CACHE.astype(dtype)), nnx.Cache(jnp.int32(0))

    def __call__(self, x):
        w = {"k": self.w[...], "out": self.w[...]}
        y, self.cache[...] = attend(w, x, self.cache[...], self.i[...], write_slice)
        self.i[...] += 1
        return y


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_module_holds_its_cache_in_16_bits(dtype):
    model, exact = Decoder(dtype), Decoder("float32")
    cast = nnx_autocast(lambda model, x: model(x), policy=BF16.with_storage("*/cache"))
    run = nnx.jit(cast)
    for _ in range(3):
        np.testing.assert_allclose(run(model, X), exact(X), rtol=0.05, atol=0.02)
    assert (model.cache[...].dtype, model.w[...].dtype) == (jnp.bfloat16, jnp.float32)
    assert int(model.i[...]) == 3


# --- what is said -----------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing_warns():
    policy = BF16.with_storage("*cash*")
    with pytest.warns(UserWarning, match=r"in_a_while has no .* '\*cash\*'.* mean 'cache'"):
        jax.eval_shape(autocast(in_a_while, policy=policy), W, X)
    assert explain(in_a_while, W, X, policy=policy).totals.unmatched_scopes == ("*cash*",)


def test_explain_says_what_is_stored():
    rows = explain(in_a_while, W, X, policy=low).rows
    (row,) = (row for row in rows if row.primitive == "dynamic_update_slice")
    assert (row.reason, row.results) == ("STORED", ("bfloat16",))
