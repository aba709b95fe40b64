"""MXFP8 and NVFP4: 32 or 16 elements along what a product sums over share a scale."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_autocast import Float8, Policy, autocast, explain
from jmp_autocast.backend import Hardware
from jmp_autocast.float8 import units
from tests.support import float8_reference as reference
from tests.support.float8_reference import bfloat16, scale_of
from tests.support.jaxprs import find, trace
from tests.support.numerics import assert_second_derivatives_close, normal, relative_error
from tests.support.xla_flags import as_users_compile

from .programs import again, layer, loss, over_layers, with_gradients

K = 64
ROWS = {"mx": 64, "nv": 48}
A = {
    name: normal(0, x=(m, K), w=(K, n), g=(m, n), square=(K, K))
    for (name, m), n in zip(ROWS.items(), (96, 40), strict=True)
}
OPTIONS = {"mx": {"minimum": 16, "gradient": "e4m3"}, "nv": {"minimum": 8, "multiple": 8}}
BOTH = pytest.mark.parametrize("scaling", ROWS)


def in_blocks(fn, scaling, output_dtype="same", dtype=jnp.bfloat16, **options):
    options = {"skip": (), "emulate": True} | OPTIONS[scaling] | options
    policy = Policy(dtype, matmul=Float8(scaling=scaling, **options))
    return autocast(fn, policy=policy, params=0, output_dtype=output_dtype)


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_values_and_gradients_are_those_of_mxfp8(gradient):
    x, w, g, _ = A["mx"].values()
    fn = in_blocks(layer, "mx", "computed", gradient=gradient)
    # Blocks of all sizes, along both dimensions.
    x, w = (a * np.geomspace(1e-6, 1e6, a.shape[0], dtype=np.float32)[:, None] for a in (x, w))
    y, dw, dx = with_gradients(fn)(w, x, g.astype(jnp.bfloat16))
    format8 = {"e5m2": reference.E5M2, "e4m3": reference.E4M3}[gradient]
    expected = reference.layer_in_blocks(x, w, g, format8)
    sums = reference.layer_in_blocks(*map(np.abs, (x, w, g)), format8)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    tolerances = 2**-8, 2**-8, 1e-6  # of 16 bits twice, and of a sum in float32
    for found, exact, whole, tolerance in zip((y, dx, dw), expected, sums, tolerances, strict=True):
        assert (np.abs(np.asarray(found, np.float64) - exact) <= tolerance * whole).all()


def in_4_bits(x, axis):
    """The numbers of an array after they were quantized, in NumPy and float64."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    exact = np.abs(blocks).max(-1, keepdims=True).astype(np.float32) * np.float32(1 / 6)
    exact = exact.astype(np.float64)
    whole = 1 / scale_of(exact)
    scale = np.maximum((exact / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float64), 2.0**-9)
    quotient = blocks.astype(np.float32) / (scale * whole).astype(np.float32)
    values = np.clip(quotient, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return np.moveaxis((values * scale * whole).reshape(x.shape), -1, axis)


def test_values_and_gradients_are_those_of_nvfp4():
    x, w, g, _ = A["nv"].values()
    # Blocks of all sizes, along both dimensions, and one of zeros.
    sizes = 2.0 ** np.linspace(-6, 6, K).round().astype(np.float32)[:, None]
    x, w = x * sizes[: len(x)], w * sizes
    x[0, :16] = 0
    args = w, x, g.astype(jnp.bfloat16)
    run = with_gradients(in_blocks(layer, "nv", "computed")).lower(*args)
    y, dw, dx = run.compile(compiler_options=as_users_compile())(*args)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    # The gradients are of what was not rounded to 4 bits: products in bfloat16, the weight's with a
    # float32 result.
    for found, left, right, tolerance in (
        (y, in_4_bits(x, 1), in_4_bits(w, 0), 2**-8),
        (dw, bfloat16(x).T, bfloat16(g), 1e-6),
        (dx, bfloat16(g), bfloat16(w).T, 2**-8),
    ):
        bound = tolerance * (np.abs(left) @ np.abs(right))
        assert (np.abs(np.asarray(found, np.float64) - left @ right) <= bound).all()


def test_what_is_kept_has_8_bits():
    x, w = A["mx"]["x"], A["mx"]["w"]
    _, pull = jax.vjp(in_blocks(layer, "mx", "computed"), w, x)
    kept = [x for x in jax.tree.leaves(pull) if np.any(np.asarray(x, np.float32))]
    shapes = {(x.dtype.name, x.shape) for x in kept if x.dtype.itemsize == 1}
    assert shapes == {("float8_e4m3fn", w.shape), ("float8_e4m3fn", x.shape)}
    assert {x.shape for x in kept if x.dtype == jnp.float32} <= {(K, 96 // 32), (64 // 32, K)}


def heads(w, x):
    y = jnp.einsum("btd,dhk->bthk", x.reshape(2, -1, K), w.reshape(K, 2, 32))
    return jnp.einsum("bthk,hkd->btd", jnp.tanh(y), w.reshape(2, 32, K)).reshape(-1, K)


@pytest.mark.parametrize("fn", [over_layers, again, heads])
@BOTH
def test_through_what_jax_does_to_programs(scaling, fn):
    low, w, x = loss(in_blocks(fn, scaling)), A[scaling]["square"] / 8, A[scaling]["x"]
    gradient = jax.jit(jax.grad(low))
    jaxpr = trace(gradient, w, x)
    operands = {v.aval.dtype.name for e in find(jaxpr, "float8_dot") for v in e.invars[:2]}
    exact, found = jax.grad(loss(fn))(w, x), gradient(w, x)
    tangent = jax.jit(lambda w: jax.jvp(lambda w: low(w, x), (w,), (exact,)))(w)[1]
    if scaling == "mx":
        assert operands == {"float8_e4m3fn"}
        assert not [e for e in find(jaxpr, "dot_general") if e.invars[0].aval.dtype.itemsize > 1]
        assert relative_error(found, exact) < 0.1
        assert relative_error(tangent, np.vdot(exact, exact)) < 0.05
    else:
        assert operands == {"float4_e2m1fn"}
        assert relative_error(found, exact) < 0.3
        assert relative_error(tangent, np.vdot(found, exact)) < 0.02
        product = jax.jit(lambda w: jax.jvp(jax.grad(low), (w, x), (w, x))[1])(w)
        assert np.isfinite(product).all()


@pytest.mark.parametrize("wgrad", ["float8", "compute"])
def test_second_derivatives_of_mxfp8(wgrad):
    low = loss(in_blocks(layer, "mx", wgrad=wgrad))
    assert_second_derivatives_close(low, loss(layer), A["mx"]["w"] / 8, A["mx"]["x"], limit=0.1)


@BOTH
def test_vmap_is_a_loop(scaling):
    x, w, *_ = A[scaling].values()
    ws, xs = np.stack([w, (3 if scaling == "mx" else 300) * w]), np.stack([x, -x])
    fn = jax.jit(jax.value_and_grad(loss(in_blocks(layer, scaling)), (0, 1)))
    looped = jax.tree.map(lambda *x: np.stack(x), *(fn(w, x) for w, x in zip(ws, xs, strict=True)))
    both = jax.jit(jax.vmap(fn))(ws, xs)
    if scaling == "nv":
        chex.assert_trees_all_close(both, looped, rtol=1e-5, atol=1e-3)
        return
    chex.assert_trees_all_equal(both, looped)
    whole = lambda fn: jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, xs) ** 2))(ws[0] / 8)
    assert relative_error(whole(in_blocks(layer, "mx")), whole(layer)) < 0.1


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_shows(bad):
    x = A["nv"]["x"].copy()
    x[3, 5] = bad
    assert not np.isfinite(jax.jit(in_blocks(layer, "nv"))(A["nv"]["w"], x)).any()


def test_float16():
    x, w = A["nv"]["x"], A["nv"]["w"]
    found = jax.jit(in_blocks(layer, "nv", dtype=jnp.float16))(w, x)
    assert relative_error(found, x @ w) < 0.2


# What is cut off of the weight and of the activation, and why the product is or is not in blocks.
SIZES = [
    ("mx", np.s_[:], np.s_[:], "operand 1 is a weight, scales of 32 elements"),
    ("mx", np.s_[:], np.s_[:48], "dimension 0 of operand 0, 48, is no multiple of 32"),
    ("mx", np.s_[:, :48], np.s_[:], "dimension 1 of operand 1, 48, is no multiple of 32"),
    ("nv", np.s_[:], np.s_[:], "operand 1 is a weight, 4 bits, scales of 16 elements"),
    ("nv", np.s_[:56], np.s_[:, :56], "dimension 1 of operand 0, 56, is no multiple of 16"),
]


@pytest.mark.parametrize(("scaling", "of_w", "of_x", "cause"), SIZES)
def test_sizes_without_whole_blocks_stay_in_the_compute_dtype(scaling, of_w, of_x, cause):
    w, x = A[scaling]["w"][of_w], A[scaling]["x"][of_x]
    assert [row.cause for row in explain(in_blocks(layer, scaling), w, x).rows] == [cause]


@BOTH
def test_what_a_gpu_gets_and_which_do_not(scaling, monkeypatch):
    device = lambda *args: monkeypatch.setattr(units, "default_device", lambda: Hardware(*args))
    low, w, x = in_blocks(layer, scaling, emulate=False), A[scaling]["w"], A[scaling]["x"]
    device("gpu", "NVIDIA B200", "10.0")
    # What JAX partitions by a rule of its own, `scaled_matmul`, holds tracers in a cycle.
    with jax.check_tracer_leaks(False):
        traced = jax.jit(jax.grad(loss(low), (0, 1))).trace(w, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = text.count("__op$block_scaled_dot"), text.count("dot_general")
    assert products == {"mx": (3, 0), "nv": (1, 2)}[scaling]
    name = {"mx": "MXFP8", "nv": "NVFP4"}[scaling]
    fixes = {("gpu", "NVIDIA H100", "9.0"): 'scaling="row"', ("cpu", "cpu"): "Leave"}
    for args, fix in fixes.items():
        device(*args)
        message = f"{args[1]} has no units for {name}"
        with pytest.warns(UserWarning, match=f"{message}.*{fix}.*emulate=True"):
            rows = explain(low, w, x).rows
        assert [row.cause for row in rows] == [message]
