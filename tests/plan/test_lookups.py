"""Rows of a table: looked up in its 16-bit copy where they are read in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, Policy, autocast, explain
from jmp_autocast.interpreters import Source
from tests.support.jaxprs import assert_dots_run_in, casts, dtypes, find, trace
from tests.support.numerics import normal, relative_error
from tests.support.plans import FULL, LOW, plan_of, planned

COMPUTE = Policy(jnp.bfloat16, level="compute")
PARAMS = normal(0, table=(64, 16), positions=(8, 16), w=(16, 16))
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 64, (4, 8)))


def taken(params, tokens):
    return jnp.take(params["table"], tokens, axis=0) @ params["w"]


def clipped(params, tokens):
    return jnp.take(params["table"], tokens, axis=0, mode="clip") @ params["w"]


def indexed(params, tokens):
    return params["table"][tokens] @ params["w"]


def in_jit(params, tokens):
    take = jax.jit(lambda table, tokens: jnp.take(table, tokens, axis=0)[:, ::2])
    return take(params["table"], tokens) @ params["w"]


def in_checkpoint(params, tokens):
    return jax.checkpoint(taken)(params, tokens)


def tied(params, tokens):
    return taken(params, tokens) @ params["table"].T


def stepwise(params, tokens):
    """Each step of a loop looks up in the one copy that was made outside."""

    def step(hidden, row):
        return jnp.tanh(taken(params, row) + hidden @ params["w"]), None

    return lax.scan(step, jnp.zeros((8, 16)), tokens)[0]


def stream(params, tokens):
    x = jnp.take(params["table"], tokens, axis=0) * 4.0 + params["positions"]
    x = x + jnp.tanh(x @ params["w"])
    return jnp.mean(jnp.abs(x), axis=-1, keepdims=True) + x @ params["table"].T


@pytest.mark.parametrize("policy", [BF16, FP16, COMPUTE], ids=["bfloat16", "float16", "compute"])
@pytest.mark.parametrize(
    "fn", [taken, clipped, indexed, in_jit, in_checkpoint, tied, stepwise], ids=lambda f: f.__name__
)
def test_lookups_of_16_bit_readers_read_one_copy(fn, policy):
    low = np.dtype(policy.compute_dtype)
    jaxpr = trace(autocast(fn, policy=policy), PARAMS, TOKENS)
    read = {dtypes(eqn.outvars)[0] for eqn in find(jaxpr, "gather")}
    assert low.name in read
    copies = [e for e in casts(jaxpr, "float32", low) if e.invars[0].aval.shape == (64, 16)]
    assert len(copies) == 1
    # No rows are cast: they come in 16 bits from the table.
    shapes = {e.invars[0].aval.shape for e in casts(jaxpr, "float32", low)}
    assert not shapes & {(4, 8, 16), (4, 4, 16), (8, 16)}
    if fn is stepwise:
        (loop,) = find(jaxpr, "scan")
        assert not casts(loop.params["jaxpr"], "float32", low)
    # To the bit what a cast of the float32 rows gives, as rounding commutes with a lookup.
    by_rows = autocast(lambda p, t: fn({**p, "table": rounded(p["table"], low)}, t), policy=policy)
    found, expected = (jax.jit(f)(PARAMS, TOKENS) for f in (autocast(fn, policy=policy), by_rows))
    np.testing.assert_array_equal(found, expected)


def rounded(x, dtype):
    return x.astype(dtype).astype(jnp.float32)


@pytest.mark.parametrize("level", ["o1", "compute"])
def test_the_gradient_of_a_row_adds_up_in_float32(level):
    def loss(params, tokens):
        return jnp.sum(stream(params, tokens)) * 1e-3

    tokens = jnp.zeros((128, 8), jnp.int32)
    exact = jax.grad(loss)(PARAMS, tokens)["table"]
    grad = jax.grad(autocast(loss, policy=Policy(jnp.bfloat16, level=level)))
    assert {dtypes(e.invars[::2]) for e in find(trace(grad, PARAMS, tokens), "scatter-add")} == {
        ("float32", "float32")
    }
    # 1,024 cotangents of one row: in bfloat16 their sum would stop at 256 times the first.
    assert relative_error(jax.jit(grad)(PARAMS, tokens)["table"][0], exact[0]) < 0.02


@pytest.mark.parametrize(("policy", "dtype"), [(BF16, "float32"), (COMPUTE, "bfloat16")])
def test_a_residual_stream_starts_in_the_dtype_of_the_level(policy, dtype):
    jaxpr = trace(autocast(stream, policy=policy), PARAMS, TOKENS)
    full_size = [e for e in find(jaxpr, "add") if e.outvars[0].aval.shape == (4, 8, 16)]
    assert {dtypes(e.outvars) for e in full_size} == {(dtype,)}
    exact = stream(PARAMS, TOKENS)
    assert relative_error(jax.jit(autocast(stream, policy=policy))(PARAMS, TOKENS), exact) < 0.01


def test_a_call_may_return_other_things_beside_rows():
    @jax.jit
    def looked_up(params, tokens):
        rows = jnp.take(params["table"], tokens, axis=0)
        return rows, 0.5, tokens, jnp.tanh(rows @ params["w"])

    def fn(params, tokens):
        rows, scale, same, hidden = looked_up(params, tokens)
        return rows @ params["w"] * scale + hidden, same, scale

    for policy in (BF16, COMPUTE):
        found, same, scale = autocast(fn, policy=policy)(PARAMS, TOKENS)
        assert relative_error(found, fn(PARAMS, TOKENS)[0]) < 0.01
        assert same.dtype == TOKENS.dtype
        assert float(scale) == 0.5


T = np.ones((64, 16), np.float32)
IDS = np.zeros((4,), np.int32)
X = np.ones((4, 16), np.float32)


@pytest.mark.parametrize(
    ("fn", "primitive", "expected"),
    [
        (lambda t, i, x: t[i] + t[i + 1], "add", LOW),
        (lambda t, i, x: jnp.concatenate([t[i], t[i + 1]], -1), "concatenate", LOW),
        # Small differences, comparisons and what data is added to are exact.
        (lambda t, i, x: x - t[i], "sub", FULL),
        (lambda t, i, x: t[i] - t[i + 1], "sub", FULL),
        (lambda t, i, x: x + t[i], "add", FULL),
        (lambda t, i, x: jnp.sum((t[i] * 2 - x) ** 2), "mul", FULL),
        (lambda t, i, x: t[:4] + t[4:8], "add", FULL),
    ],
    ids=["sum", "join", "data_less_rows", "difference", "data", "distance", "slices"],
)
def test_what_becomes_of_rows_at_level_compute(fn, primitive, expected):
    leaves = (Source.PARAM, Source.DATA, Source.DATA)
    plan = plan_of(fn, T, IDS, X, policy=COMPUTE, leaves=leaves)
    assert planned(plan, primitive).results[0].dtype == expected
    assert planned(plan_of(fn, T, IDS, X, leaves=leaves), primitive).results[0].dtype == FULL


def test_comparisons_with_rows_are_exact():
    def above(table, x):
        return x > jnp.take(table, IDS)

    table = jnp.full((64,), 1.001)
    run = autocast(above, policy=COMPUTE, params=0)
    assert bool(run(table, jnp.float32(1.0011)).all())
    assert not bool(run(table, jnp.float32(1.0009)).any())


def test_a_literal_that_is_broadcast_comes_from_no_input():
    def f(w, x):
        return x @ w * jnp.broadcast_to(jnp.float32(0.1), (8,))

    inputs = jnp.ones((8, 8)), jnp.ones((2, 8))
    mixed = autocast(f, jnp.bfloat16)
    assert_dots_run_in("bfloat16", trace(mixed, *inputs))
    np.testing.assert_allclose(mixed(*inputs), f(*inputs), rtol=1e-2)


def test_rows_vote_as_activations_do():
    gated = lambda params, tokens: params["table"][tokens] * taken(params, tokens) @ params["w"]
    rows = explain(autocast(gated, policy=BF16, params=0), PARAMS, TOKENS).rows
    assert [row.results for row in rows if row.primitive == "mul"] == [("float32",)]
