"""Products in 8 bits, with one scale for an array or one for each row: values and derivatives."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, Float8, Policy, autocast, compare, explain
from jmp_autocast.float8.scale import quantize
from jmp_autocast.policies import E4M3
from jmp_autocast.quantize_params import quantize_params
from tests.support import float8_reference as reference
from tests.support.jaxprs import casts, equations, find, trace
from tests.support.numerics import assert_second_derivatives_close, normal, relative_error

from .programs import (
    again,
    assert_derivatives_near,
    in_a_loop,
    layer,
    loss,
    over_layers,
    over_layers_again,
    quantized,
    through_shards,
    with_gradients,
)

RECIPE = Float8(minimum=16, skip=(), emulate=True)
FP8 = Policy(jnp.bfloat16, matmul=RECIPE)
K, M, N = 64, 32, 48
A = normal(0, x=(M, K), w=(K, N), g=(M, N), stack=(3, K, K), square=(K, K))
F8 = "float8_e4m3fn", "float8_e5m2"


def float8(fn, output_dtype="same", **options):
    """The function with the products of its first argument in 8 bits."""
    policy = Policy(jnp.bfloat16, matmul=dataclasses.replace(RECIPE, **options))
    return autocast(fn, policy=policy, params=0, output_dtype=output_dtype)


by_row = functools.partial(float8, scaling="row")


def dots(jaxpr):
    """(operand, operand, result) dtypes of the products in 8 bits."""
    found = [e for e in find(jaxpr, "float8_dot") if e.params["raw"] is None]
    return [(*(v.aval.dtype.name for v in e.invars[:2]), e.params["out"].name) for e in found]


def test_a_default_policy_makes_no_float8():
    text = str(trace(jax.grad(loss(autocast(layer, policy=BF16))), A["w"], A["x"]))
    assert "f8" not in text
    assert "float8" not in text


@pytest.mark.parametrize(
    ("scaling", "wgrad", "gradient", "size"),
    [
        ("tensor", "float8", "e5m2", 1.0),
        ("tensor", "float8", "e5m2", 1e-25),
        ("tensor", "float8", "e5m2", 1e15),
        ("tensor", "float8", "e4m3", 1.0),
        ("tensor", "compute", "e5m2", 1.0),
        ("row", "float8", "e5m2", 1.0),
        ("row", "float8", "e4m3", 1e-18),
        ("row", "compute", "e5m2", 1e15),
    ],
)
def test_values_and_gradients_are_those_of_the_recipe(scaling, wgrad, gradient, size):
    fn = float8(layer, "computed", wgrad=wgrad, gradient=gradient, scaling=scaling)
    x, w, g, by_recipe = A["x"] * np.float32(size), A["w"], A["g"], reference.layer
    if scaling == "row":
        # Rows and columns of all sizes: with one scale, half of them would be rounded to zero.
        x = x * np.geomspace(1e-6, 1e6, M, dtype=np.float32)[:, None]
        w, by_recipe = w * np.geomspace(1e-6, 1e6, N, dtype=np.float32), reference.layer_by_row
    y, dw, dx = with_gradients(fn)(w, x, g.astype(jnp.bfloat16))
    format8 = {"e5m2": reference.E5M2, "e4m3": reference.E4M3}[gradient]
    expected = by_recipe(x, w, g, format8, wgrad)
    sums = by_recipe(*map(np.abs, (x, w, g)), format8, wgrad)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    tolerances = 2**-8, 2**-8, 1e-6  # of 16 bits twice, and of a sum in float32
    for found, exact, whole, tolerance in zip((y, dx, dw), expected, sums, tolerances, strict=True):
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert (error <= tolerance * whole).all()


def test_what_is_multiplied_and_what_is_kept():
    grad = jax.value_and_grad(loss(float8(layer)), argnums=(0, 1))
    jaxpr = trace(grad, A["w"], A["x"])
    e4m3, e5m2 = F8
    assert dots(jaxpr) == [
        (e4m3, e4m3, "bfloat16"),
        (e4m3, e5m2, "float32"),
        (e5m2, e4m3, "bfloat16"),
    ]
    assert not [e for e in find(jaxpr, "dot_general") if e.invars[0].aval.dtype.itemsize > 1]
    split = [e.params["split"] for e in find(jaxpr, "float8_dot")]
    assert split == [False, True, True]

    _, pull = jax.vjp(float8(layer, "computed"), A["w"], A["x"])
    kept = [x for x in jax.tree.leaves(pull) if jnp.ndim(x)]
    assert {x.dtype.name for x in kept if np.asarray(x, np.float32).any()} == {e4m3}


def test_scales_are_powers_of_two_that_fit():
    low = float8(layer)
    y = low(A["w"], A["x"])
    assert y.dtype == jnp.float32  # as the program declares it
    np.testing.assert_array_equal(jax.jit(low)(A["w"], A["x"]), y)
    for power in (-20, 7):
        np.testing.assert_array_equal(low(A["w"], A["x"] * 2.0**power), y * 2.0**power)
    # Just below a power of two, the largest element is beyond 1.75 times the one before.
    for largest in (1.74, 1.76, 1.99, 2.0):
        x = A["x"] / np.abs(A["x"]).max() * np.float32(largest)
        exact = reference.rounded(x) @ reference.rounded(A["w"])
        np.testing.assert_allclose(low(A["w"], x), exact, rtol=2**-8, atol=2**-8)


def test_wgrad_in_the_compute_dtype():
    jaxpr = trace(jax.grad(loss(float8(layer, wgrad="compute"))), A["w"], A["x"])
    (eqn,) = find(jaxpr, "accumulate")
    assert (eqn.params["low"], eqn.outvars[0].aval.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_reaches_losses_and_gradients(bad):
    x = A["x"].copy()
    x[0, 0] = bad
    value, grad = jax.value_and_grad(loss(float8(layer)))(A["w"], x)
    assert np.isnan([value, *np.ravel(grad)]).all()
    g = A["g"].copy()
    g[0, 0] = bad
    weighted = lambda w: jnp.sum(float8(layer)(w, A["x"]) * g)
    assert np.isnan(jax.grad(weighted)(A["w"])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_one_bad_element_makes_all_values_of_its_scale_nan(size, dtype):
    """XLA:CPU drops a NaN from a maximum of about 4,096 float32 numbers or more."""
    x = np.ones((20, size // 20), np.float32)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x[13, 7] = bad
        for rows, nans in (((), size), ((0,), size // 20), ((1,), 20)):
            in_8_bits = jax.jit(functools.partial(quantize, dtype=E4M3, rows=rows))
            values, inverse = in_8_bits(x.astype(dtype))
            assert np.isnan(values.astype(np.float32)).sum() == nans
            assert np.isnan(inverse).sum() == 1


def test_zeros_and_float16():
    zeros = np.zeros_like(A["x"])
    y, grad = jax.value_and_grad(loss(float8(layer)))(A["w"], zeros)
    assert not np.any([y, *np.ravel(grad)])
    half = Policy(jnp.float16, matmul=RECIPE)
    w, x = np.full((4096, 16), 0.1, np.float32), np.full((16, 4096), 3.0, np.float32)
    y = jax.jit(autocast(layer, policy=half, params=0))(w, x)
    # 448 * 448 * 4096 is beyond float16, which ends at 65,504; the product is not.
    np.testing.assert_allclose(y, 4096 * 0.1 * 3.0, rtol=2**-4)


# --- around the product ---------------------------------------------------------------------


def through_cond(w, x):
    return lax.cond(x.sum() < 1e9, lambda w, x: jnp.tanh(x @ w), lambda w, x: x, w, x)


def through_while(w, x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def through_calls(w, x):
    step = jax.jit(lambda w, x: jnp.tanh(x @ w))
    return step(w, step(w, x))


def through_vmap(w, x):
    return jax.vmap(lambda row: jnp.tanh(row @ w))(x)


# How often a weight is quantized, in the whole program and in its loops and checkpoints. What runs
# again rounds it again, by the scale that was kept: its largest element is looked for once.
INSIDE = {
    in_a_loop: (1, 0),
    over_layers: (1, 1),
    over_layers_again: (2, 2),
    again: (2, 1),
    through_cond: (1, 0),
    through_while: (1, 0),
    through_calls: (1, 0),
    through_vmap: (1, 0),
    through_shards: (1, 1),
}
DIFFERENTIABLE = [fn for fn in INSIDE if fn is not through_while]


@pytest.mark.parametrize("fn", INSIDE)
def test_a_weight_is_quantized_once_where_it_comes_from(fn):
    low = float8(fn)
    program = low if fn is through_while else jax.grad(loss(low))
    jaxpr = trace(program, A["square"], A["x"])
    assert find(jaxpr, "float8_dot")
    around = ("scan", "while", "cond", "remat2", "checkpoint", "shard_map")
    whole = [e for e in equations(jaxpr, whole=around)]
    weights = lambda eqns: sum(
        e.primitive.name == "convert_element_type"
        and e.outvars[0].aval.dtype.name in F8
        and e.outvars[0].aval.shape == (K, K)
        for e in eqns
    )
    total, inside = INSIDE[fn]
    assert (weights(equations(jaxpr)), weights(equations(jaxpr)) - weights(whole)) == (
        total,
        inside,
    )
    searched = [e for e in find(jaxpr, "reduce_max") if e.invars[0].aval.shape == (K, K)]
    assert len(searched) == 1
    # The values are near those of the program itself, and jit changes none of them much.
    w = A["square"] / 8
    found, exact = jax.jit(low)(w, A["x"]), fn(w, A["x"])
    assert 0 < relative_error(found, exact) < 0.15


@pytest.mark.parametrize("fn", DIFFERENTIABLE)
def test_gradients_and_forward_mode_through_it(fn):
    assert_derivatives_near(loss(float8(fn)), loss(fn), A["square"] / 8, A["x"])


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("wgrad", ["float8", "compute"])
def test_second_derivatives(wgrad, scaling):
    # Rows of all sizes: a scale that is missing, or counted twice, is a factor of a million.
    size = 1e3 if scaling == "row" else 1.0
    rows = np.geomspace(1 / size, size, M, dtype=np.float32)[:, None]
    columns = np.geomspace(1 / size, size, N, dtype=np.float32)
    w, x = A["w"] / 8, A["x"]
    program = lambda fn: loss(lambda w, x: fn(w * columns, jnp.tanh(x) * rows) / columns / rows)
    low, full = program(float8(layer, wgrad=wgrad, scaling=scaling)), program(layer)
    assert_second_derivatives_close(low, full, w, x, limit=0.15)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_vmap_is_a_loop(scaling):
    one = float8(lambda w, x: jnp.tanh(x @ w), scaling=scaling)
    ws, xs = A["stack"], np.stack([A["x"], 3 * A["x"], 1e-3 * A["x"]])
    cases = {
        (None, 0): lambda fn: [fn(ws[0], x) for x in xs],
        (0, None): lambda fn: [fn(w, xs[0]) for w in ws],
        (0, 0): lambda fn: [fn(w, x) for w, x in zip(ws, xs, strict=True)],
    }
    for axes, looped in cases.items():
        args = [a if d == 0 else a[0] for a, d in zip((ws, xs), axes, strict=True)]
        for fn in (jax.jit(one), jax.jit(jax.grad(loss(one)))):  # per-example gradients, too
            found = jax.jit(jax.vmap(fn, in_axes=axes))(*args)
            np.testing.assert_array_equal(found, jnp.stack(looped(fn)))
    # The weight is quantized as it is, without the dimension of the batch.
    assert quantized(trace(jax.vmap(one, (None, 0)), ws[0], xs)) == [(3, M, K), (K, K)]
    # A gradient of the whole batch sums examples that have scales of their own.
    whole = lambda fn: jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, xs)))(ws[0] / 8)
    assert relative_error(whole(one), whole(lambda w, x: jnp.tanh(x @ w))) < 0.15


# The operands' shapes, and the dimensions of each that a product sums over.
SHAPES = {
    "heads": ("btd,dhk->bthk", (2, 16, K), (K, 4, 16), 2, 0),
    "heads merged": ("bthk,hkd->btd", (2, 16, 4, 16), (4, 16, K), (2, 3), (0, 1)),
    "weight on the left": ("bk,kn->nb", (16, K), (K, 16), 1, 0),
    "experts": ("ecd,edf->ecf", (2, 16, K), (2, K, 16), 2, 1),
}


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_other_shapes(name, scaling):
    spec, of_x, of_w, *axes = SHAPES[name]
    x, w = normal(0, a=of_x)["a"], normal(1, a=of_w)["a"]
    if name == "weight on the left":
        fn = lambda w, x: jnp.einsum("kn,bk->nb", w, x)
    else:
        fn = lambda w, x: jnp.einsum(spec, x, w)
    low = float8(fn, scaling=scaling)
    assert find(trace(low, w, x), "float8_dot")
    axes = axes if scaling == "row" else (None, None)
    rounded = (reference.rounded(a, axis=d) for a, d in zip((x, w), axes, strict=True))
    assert relative_error(jax.jit(low)(w, x), np.einsum(spec, *rounded)) < 2**-8
    found = jax.jit(jax.grad(loss(low), argnums=(0, 1)))(w, x)
    for a, b in zip(found, jax.grad(loss(fn), argnums=(0, 1))(w, x), strict=True):
        assert relative_error(a, b) < 0.15


def test_a_moved_weight_and_parts_of_one():
    moved = lambda w, x: x @ w.T.reshape(K, K)
    assert quantized(trace(float8(moved), A["square"], A["x"])) == [(M, K), (K, K)]

    def parts(w, x):  # each part has a scale of its own
        return sum(x @ part for part in jnp.split(w, 2, axis=1))

    w = A["square"] * np.repeat([1.0, 1e-6], K // 2).astype(np.float32)
    assert quantized(trace(float8(parts), w, A["x"]))[-2:] == [(K, K // 2)] * 2
    only_small = lambda w, x: x @ w[:, K // 2 :]
    found, exact = float8(only_small)(w, A["x"]), only_small(w, A["x"])
    assert relative_error(found, exact) < 0.06


def test_rules_of_users_stay_as_they_are():
    @jax.custom_vjp
    def mine(w, x):
        return x @ w

    mine.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
    fn = lambda w, x: mine(w, x) + x @ w
    low = float8(fn)
    jaxpr = trace(jax.grad(loss(low)), A["w"], A["x"])
    assert len(dots(jaxpr)) == 2  # of the other product: forward, and its weight's gradient


def test_export_and_a_constant_weight():
    low = float8(lambda w, x: jnp.tanh(x @ w))
    exported = jax.export.export(jax.jit(low), platforms=("cpu", "cuda", "tpu"))(A["w"], A["x"])
    again = jax.export.deserialize(exported.serialize())
    chex.assert_trees_all_close(again.call(A["w"], A["x"]), jax.jit(low)(A["w"], A["x"]))
    closed = trace(lambda x: low(A["w"], x), A["x"])
    assert quantized(closed) == [(M, K)]  # the weight is quantized when the program is traced


def test_an_inner_autocast_is_left_alone():
    inner = float8(layer)
    fn = autocast(lambda w, x: jnp.tanh(inner(w, x)) @ w.T, policy=BF16)
    jaxpr = trace(fn, A["w"], A["x"])
    assert len(dots(jaxpr)) == 1
    assert len(casts(jaxpr, jnp.float32, jnp.bfloat16)) >= 1


# --- scales of rows ---------------------------------------------------------------------------


def test_an_outlier_costs_the_precision_of_its_row_alone():
    x = A["x"].copy()
    x[0] *= 1e5
    exact = layer(A["w"], x)[1:]
    errors = {
        s: relative_error(float8(layer, scaling=s)(A["w"], x)[1:], exact) for s in ("tensor", "row")
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


def twice(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x)


# How often arrays of the size of the weight are quantized, and searched for the largest elements.
COUNTS = {
    over_layers: (1, 1),
    twice: (2, 1),  # the backward pass rounds it again, by the scales that were kept
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


def test_reports_say_so_and_what_is_not_supported_says_why():
    rows = explain(by_row(layer), A["w"], A["x"]).rows
    (cause,) = (row.cause for row in rows if row.reason == "FLOAT8")
    assert cause == "operand 1 is a weight, scales by row"
    assert compare(by_row(layer), A["w"], A["x"]).rows
    with pytest.raises(ValueError, match=r"one scale for an array.*scaling='row'"):
        quantize_params(by_row(layer), A["w"], A["x"])
