"""Products in 8 bits with a scale for each row of an activation and each column of a weight."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Float8, Policy, autocast, compare, explain
from jmp_autocast.quantize_params import quantize_params
from tests.support import float8_reference as reference
from tests.support.jaxprs import find, trace
from tests.support.numerics import assert_second_derivatives_close, normal, relative_error

from .programs import (
    assert_derivatives_near,
    in_a_loop,
    layer,
    loss,
    over_layers,
    quantized,
    through_shards,
    with_gradients,
)

K, M, N = 64, 32, 48
A = normal(0, x=(M, K), w=(K, N), g=(M, N), square=(K, K))
BY_ROW = Float8(minimum=16, skip=(), emulate=True, scaling="row")


def by_row(fn, output_dtype="same", **options):
    policy = Policy(jnp.bfloat16, matmul=dataclasses.replace(BY_ROW, **options))
    return autocast(fn, policy=policy, params=0, output_dtype=output_dtype)


@pytest.mark.parametrize(
    ("wgrad", "gradient", "size"),
    [("float8", "e5m2", 1.0), ("float8", "e4m3", 1e-18), ("compute", "e5m2", 1e15)],
)
def test_values_and_gradients_are_those_of_the_recipe(wgrad, gradient, size):
    fn = by_row(layer, "computed", wgrad=wgrad, gradient=gradient)
    # Rows and columns of all sizes: with one scale, half of them would be rounded to zero.
    x = A["x"] * np.float32(size) * np.geomspace(1e-6, 1e6, M, dtype=np.float32)[:, None]
    w = A["w"] * np.geomspace(1e-6, 1e6, N, dtype=np.float32)
    y, dw, dx = with_gradients(fn)(w, x, A["g"].astype(jnp.bfloat16))
    format8 = {"e5m2": reference.E5M2, "e4m3": reference.E4M3}[gradient]
    expected = reference.layer_by_row(x, w, A["g"], format8, wgrad)
    sums = reference.layer_by_row(*map(np.abs, (x, w, A["g"])), format8, wgrad)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    tolerances = 2**-8, 2**-8, 1e-6  # of 16 bits twice, and of a sum in float32
    for found, exact, whole, tolerance in zip((y, dx, dw), expected, sums, tolerances, strict=True):
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert (error <= tolerance * whole).all()


def test_an_outlier_costs_the_precision_of_its_row_alone():
    x = A["x"].copy()
    x[0] *= 1e5
    exact = layer(A["w"], x)[1:]
    errors = {
        s: relative_error(by_row(layer, scaling=s)(A["w"], x)[1:], exact) for s in ("tensor", "row")
    }
    assert errors["row"] < 0.04 < 0.3 < errors["tensor"]


def test_one_copy_of_each_operand_serves_all_three_products():
    jaxpr = trace(jax.grad(loss(by_row(layer)), argnums=(0, 1)), A["w"], A["x"])
    # The cotangent has the scales of another direction, and of the other factor, in each gradient.
    assert quantized(jaxpr) == [(M, N), (M, N), (M, K), (K, N)]
    _, pull = jax.vjp(by_row(layer, "computed"), A["w"], A["x"])
    kept = {
        x.dtype.name: x.shape for x in jax.tree.leaves(pull) if np.any(np.asarray(x, np.float32))
    }
    assert kept == {"float8_e4m3fn": (K, N), "float32": (1, N)} | kept
    assert not [e for e in find(jaxpr, "dot_general") if e.invars[0].aval.dtype.itemsize > 1]


def test_what_is_not_finite_stays_in_its_row_and_reaches_the_gradient():
    x = A["x"].copy()
    x[3, 0] = np.inf
    low = by_row(layer)
    assert np.isnan(low(A["w"], x)).sum(1).tolist() == [N * (i == 3) for i in range(M)]
    assert np.isnan(jax.grad(loss(low))(A["w"], x)).all()


def again(w, x):
    """A moved weight has other rows."""
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x)


# How often arrays of the size of the weight are quantized, and searched for the largest elements.
COUNTS = {
    over_layers: (1, 1),
    again: (2, 1),  # the backward pass rounds it again, by the scales that were kept
    through_shards: (1, 1),
    in_a_loop: (1, 1),
    lambda w, x: jnp.tanh(x @ w) @ w.T: (2, 2),  # rows of the moved weight are other rows
}


@pytest.mark.parametrize("fn", COUNTS)
def test_through_what_jax_does_to_programs(fn):
    low, w, x = loss(by_row(fn)), A["square"] / 8, A["x"]
    jaxpr = trace(jax.grad(low), w, x)
    size = lambda name, at: sum(
        e.invars[0].aval.shape == (K, K) for e in find(jaxpr, name) if at(e)
    )
    is_8_bit = lambda e: e.outvars[0].aval.dtype.itemsize == 1
    found = size("convert_element_type", is_8_bit), size("reduce_max", lambda e: True)
    assert found == COUNTS[fn]
    assert_derivatives_near(low, loss(fn), w, x)


@pytest.mark.parametrize("wgrad", ["float8", "compute"])
def test_second_derivatives(wgrad):
    # Rows of all sizes: a scale that is missing, or counted twice, is a factor of a million.
    rows = np.geomspace(1e-3, 1e3, M, dtype=np.float32)[:, None]
    columns = np.geomspace(1e-3, 1e3, N, dtype=np.float32)
    w, x = A["w"] / 8, A["x"]
    program = lambda fn: loss(lambda w, x: fn(w * columns, jnp.tanh(x) * rows) / columns / rows)
    low, full = program(by_row(layer, wgrad=wgrad)), program(layer)
    assert_second_derivatives_close(low, full, w, x, limit=0.15)


def test_vmap_is_a_loop():
    one, ws, xs = by_row(layer), np.stack([A["w"], 3 * A["w"]]), np.stack([A["x"], -A["x"]])
    fn = jax.jit(jax.value_and_grad(loss(one), (0, 1)))
    looped = [[fn(w, x) for x in xs] for w in ws]
    over = lambda axes, *args: jax.jit(jax.vmap(fn, axes))(*args)
    stacked = lambda *trees: jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
    chex.assert_trees_all_equal(over((None, 0), ws[0], xs), stacked(*looped[0]))
    chex.assert_trees_all_equal(over((0, 0), ws, xs), stacked(looped[0][0], looped[1][1]))
    # A gradient of the whole batch sums over examples, which have scales of their own.
    whole = lambda fn: jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, xs) ** 2))(ws[0] / 8)
    assert relative_error(whole(one), whole(layer)) < 0.15


def test_reports_say_so_and_what_is_not_supported_says_why():
    rows = explain(by_row(layer), A["w"], A["x"]).rows
    (cause,) = (row.cause for row in rows if row.reason == "FLOAT8")
    assert cause == "operand 1 is a weight, scales by row"
    assert compare(by_row(layer), A["w"], A["x"]).rows
    with pytest.raises(ValueError, match=r"one scale for an array.*scaling='row'"):
        quantize_params(by_row(layer), A["w"], A["x"])
