"""Gradients of looked-up rows and of positions, where gradients of weights are rounded."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import Policy, autocast
from jmp_autocast.interpreters.primitives.equal_rows import as_first_rows
from tests.support.jaxprs import dtypes, find, trace
from tests.support.numerics import normal, relative_error

PARAMS = normal(0, table=(64, 16), positions=(8, 16), w=(16, 16))
TOKENS = np.random.default_rng(1).integers(0, 64, (4, 8)).astype(np.int32)
LOW = Policy("bfloat16", level="compute", weight_gradients="compute")


def stream(params, tokens):
    x = jnp.take(params["table"], tokens, axis=0) + params["positions"]
    return jnp.sum(jnp.sin(x @ params["w"]))


def rows_alone(params, tokens):
    return jnp.sum(jnp.sin(jnp.take(params["table"], tokens, axis=0) @ params["w"]))


def scatters(gradient, *args):
    """The dtypes of all sums of rows, by the shape of the result."""
    found = find(trace(gradient, *args), "scatter-add")
    return {e.outvars[0].aval.shape: dtypes(e.invars[::2]) for e in found}


def test_rows_are_added_up_in_float32_in_a_sequence_and_in_16_bits_over_them():
    found = scatters(jax.grad(autocast(stream, policy=LOW)), PARAMS, TOKENS)
    assert found == {(4, 8, 16): ("float32",) * 2, (64, 16): ("bfloat16",) * 2}
    exact = scatters(
        jax.grad(autocast(stream, policy=dataclasses.replace(LOW, weight_gradients="float32"))),
        PARAMS,
        TOKENS,
    )
    assert exact == {(64, 16): ("float32",) * 2}


@pytest.mark.parametrize("batch", [(), (3,)], ids=["plain", "mapped"])
def test_a_row_that_is_looked_up_often(batch):
    """8,192 cotangents of one row: in bfloat16 alone their sum stops at 256."""

    def loss(params, tokens):
        return jnp.sum(jnp.take(params["table"], tokens, axis=0))

    tokens = np.zeros((*batch, 8, 1024), np.int32)
    gradient = jax.grad(autocast(loss, policy=LOW))
    if batch:
        gradient = jax.vmap(gradient, (None, 0))
    found = jax.jit(gradient)({"table": PARAMS["table"]}, tokens)["table"]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[..., 0, :], 8192.0)
    assert not found[..., 1:, :].any()


SHAPES = {
    "no_sequences": (32,),
    "sequences_of_one": (32, 1),
    "more_sequences_than_a_16_bit_sum_takes": (257, 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_other_lookups_are_added_up_in_float32(shape):
    tokens = np.zeros(shape, np.int32)
    found = scatters(jax.grad(autocast(rows_alone, policy=LOW)), PARAMS, tokens)
    assert found == {(64, 16): ("float32",) * 2}


def test_lookups_in_a_shard_map_are_added_up_in_float32():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params, tokens):
        half = autocast(rows_alone, policy=LOW)
        return jax.lax.psum(half(params, tokens), "data")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with jax.check_tracer_leaks(False):  # JAX finds one in the gradient of the plain program, too
        found = scatters(jax.grad(mapped), PARAMS, np.tile(TOKENS, (4, 1)))
    assert found == {(64, 16): ("float32",) * 2}


def test_explicit_mesh_axes():
    """`x.at[ids].get` looks up under automatic axes: there it is as without a mesh."""

    def loss(out_sharding, params, tokens):
        rows = params["table"].at[tokens].get(out_sharding=out_sharding)
        return jnp.sum(jnp.sin(rows @ params["w"]))

    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        tokens = jax.device_put(TOKENS, P("data"))
        half = jax.grad(autocast(partial(loss, P("data")), policy=LOW, params=0))
        assert scatters(half, PARAMS, tokens)[64, 16] == ("bfloat16",) * 2
        found = jax.jit(half)(PARAMS, tokens)
    exact = jax.grad(partial(loss, None))(PARAMS, TOKENS)
    assert relative_error(found["table"], exact["table"]) < 0.02


MOVED = {
    "slice": lambda rows: rows[:, ::2],
    "split": lambda rows: jnp.split(rows, 2, axis=-1)[1],
    "transpose": lambda rows: jnp.swapaxes(rows, 0, 1),
    "reshape": lambda rows: rows.reshape(-1, 16),
}


@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
def test_rows_that_are_moved(move):
    def loss(params, tokens):
        rows = move(jnp.take(params["table"], tokens, axis=0))
        return jnp.sum(jnp.sin(rows @ params["w"][: rows.shape[-1]]))

    half = jax.grad(autocast(loss, policy=LOW))
    assert scatters(half, PARAMS, TOKENS)[64, 16] == ("bfloat16",) * 2
    found, exact = jax.jit(half)(PARAMS, TOKENS), jax.grad(loss)(PARAMS, TOKENS)
    assert relative_error(found["table"], exact["table"]) < 0.02


def test_rows_that_are_read_in_float32_have_a_float32_gradient():
    def loss(params, tokens):
        return jnp.sum(jnp.log(jnp.exp(jnp.take(params["table"], tokens, axis=0)) + 1.0))

    found = scatters(jax.grad(autocast(loss, policy=LOW)), PARAMS, TOKENS)
    assert found[64, 16] == ("float32",) * 2


def test_other_derivatives_of_rows():
    half = autocast(stream, policy=LOW)
    value, tangent = jax.jvp(lambda p: half(p, TOKENS), (PARAMS,), (PARAMS,))
    exact = jax.jvp(lambda p: stream(p, TOKENS), (PARAMS,), (PARAMS,))
    np.testing.assert_allclose((value, tangent), exact, rtol=0.05)
    second = lambda f: jax.grad(
        lambda p: sum(jnp.vdot(x, x) for x in jax.tree.leaves(jax.grad(f)(p, TOKENS)))
    )(PARAMS)
    for found, wanted in zip(*map(jax.tree.leaves, (second(half), second(stream))), strict=True):
        assert relative_error(found, wanted) < 0.05


def test_a_position_has_one_16_bit_cotangent_for_each_sequence():
    """And a bias, of one dimension, has a float32 sum; so has all of it for 257 sequences."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"] + params["bias"] + params["positions"]))

    def sums(sequences):
        params, x = {**PARAMS, "bias": PARAMS["w"][0]}, np.ones((sequences, 8, 16), np.float32)
        found = find(trace(jax.grad(autocast(loss, policy=LOW)), params, x), "reduce_sum")
        shapes = ((e.outvars[0].aval, e.invars[0].aval) for e in found)
        return {out.shape: given.dtype.name for out, given in shapes if given.shape[0] == sequences}

    assert sums(256) == {(8, 16): "bfloat16", (16,): "float32", (): "float32"}
    assert sums(257) == {(8, 16): "float32", (16,): "float32", (): "float32"}


@pytest.mark.parametrize(
    "table", [P("data"), P(None, "data"), P()], ids=["rows", "columns", "whole"]
)
def test_devices_send_16_bits(table):
    """In float16, because XLA moves bfloat16 as float32 between CPUs."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = partial(NamedSharding, mesh)
    places = {"table": place(table), "positions": place(P("data")), "w": place(P())}
    policy = Policy("float16", level="compute", weight_gradients="compute")
    params = jax.device_put(PARAMS, places)
    tokens = jax.device_put(np.tile(TOKENS, (8, 1)), place(P("data")))

    def loss(params, tokens):
        x = jnp.take(params["table"], tokens, axis=0) + params["positions"]
        x = jax.lax.with_sharding_constraint(x, place(P("data")))
        return jnp.sum(jnp.sin(x @ params["w"]))

    gradient = jax.jit(jax.grad(autocast(loss, policy=policy)), out_shardings=places)
    compiled = gradient.lower(params, tokens).compile()
    collective = r"= (.*) (?:all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\("
    sent = re.findall(collective, compiled.as_text() or "")
    assert sent
    assert not [types for types in sent if "f32" in types]
    exact = jax.grad(stream)(PARAMS, np.tile(TOKENS, (8, 1)))
    for name, array in compiled(params, tokens).items():
        assert relative_error(array, exact[name]) < 0.02


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_the_first_of_equal_rows(dtype):
    ids = jnp.asarray(np.arange(600).reshape(1, 600) % 251, dtype)
    rows = normal(0, rows=(1, 600, 2))["rows"].astype(jnp.float16)
    rows = rows[:, ids[0].astype(int)]
    np.testing.assert_array_equal(as_first_rows(rows, ids), rows)
    cotangent = jax.grad(lambda rows: jnp.sum(as_first_rows(rows, ids)))(rows)
    expected = np.zeros((600, 2))
    np.add.at(expected, np.arange(600) % 251, 1.0)
    np.testing.assert_array_equal(cotangent[0], expected)
