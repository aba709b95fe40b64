"""Products in NVFP4: 4 bits, an 8-bit scale for 16 elements along what a product sums over."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jmp_autocast import Float8, Policy, autocast, explain
from jmp_autocast.backend import Device
from jmp_autocast.float8 import units
from tests.support.float8_reference import bfloat16, scale_of
from tests.support.jaxprs import find, trace
from tests.support.numerics import normal, relative_error
from tests.support.xla_flags import as_users_compile

K, M, N = 64, 48, 40
A = normal(0, x=(M, K), w=(K, N), g=(M, N), square=(K, K))


def nv(fn, output_dtype="same", emulate=True, dtype=jnp.bfloat16, **options):
    recipe = Float8(minimum=8, multiple=8, skip=(), emulate=emulate, scaling="nv", **options)
    policy = Policy(dtype, matmul=recipe)
    return autocast(fn, policy=policy, params=0, output_dtype=output_dtype)


def layer(w, x):
    return x @ w


def loss(fn):
    return lambda w, x: jnp.sum(jnp.sin(fn(w, x) / 4))


def rounded(x, axis):
    """The numbers of an array after they were quantized, in NumPy and float64."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    exact = (np.abs(blocks).max(-1, keepdims=True).astype(np.float32) * np.float32(1 / 6)).astype(
        np.float64
    )
    whole = 1 / scale_of(exact)
    scale = np.maximum((exact / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float64), 2.0**-9)
    quotient = blocks.astype(np.float32) / (scale * whole).astype(np.float32)
    values = np.clip(quotient, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return np.moveaxis((values * scale * whole).reshape(x.shape), -1, axis)


def test_values_and_gradients_are_those_of_the_recipe():
    fn = nv(layer, "computed")
    run = jax.jit(lambda w, x, g: (lambda y, pull: (y, *pull(g)))(*jax.vjp(fn, w, x)))
    # Blocks of all sizes, along both dimensions, and one of zeros.
    sizes = 2.0 ** np.linspace(-6, 6, K).round().astype(np.float32)[:, None]
    x, w = A["x"] * sizes[:M], A["w"] * sizes
    x[0, :16] = 0
    args = w, x, A["g"].astype(jnp.bfloat16)
    y, dw, dx = run.lower(*args).compile(compiler_options=as_users_compile())(*args)
    g = bfloat16(A["g"])
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    exact = rounded(x, 1) @ rounded(w, 0)
    whole = np.abs(rounded(x, 1)) @ np.abs(rounded(w, 0))
    assert (np.abs(np.asarray(y, np.float64) - exact) <= 2**-8 * whole).all()
    # Of what was not rounded to 4 bits: products in bfloat16, the weight's with a float32 result.
    for found, left, right, tolerance in (
        (dw, bfloat16(x).T, g, 1e-6),
        (dx, g, bfloat16(w).T, 2**-8),
    ):
        bound = tolerance * (np.abs(left) @ np.abs(right))
        assert (np.abs(np.asarray(found, np.float64) - left @ right) <= bound).all()


def over_layers(w, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, -w]))[0]


def again(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(w, x)


def heads(w, x):
    y = jnp.einsum("btd,dhk->bthk", x.reshape(2, 24, K), w.reshape(K, 2, 32))
    return jnp.einsum("bthk,hkd->btd", jnp.tanh(y), w.reshape(2, 32, K)).reshape(M, K)


@pytest.mark.parametrize("fn", [over_layers, again, heads])
def test_through_what_jax_does_to_programs(fn):
    low, w, x = loss(nv(fn)), A["square"] / 8, A["x"]
    jaxpr = trace(jax.grad(low), w, x)
    assert {v.aval.dtype.name for e in find(jaxpr, "float8_dot") for v in e.invars[:2]} == {
        "float4_e2m1fn"
    }
    exact = jax.grad(loss(fn))(w, x)
    assert relative_error(jax.jit(jax.grad(low))(w, x), exact) < 0.3
    tangent = jax.jit(lambda w: jax.jvp(lambda w: low(w, x), (w,), (exact,)))(w)[1]
    pulled = jax.jit(jax.grad(low))(w, x)
    assert relative_error(tangent, np.vdot(pulled, exact)) < 0.02
    product = jax.jit(lambda w: jax.jvp(jax.grad(low), (w, x), (w, x))[1])(w)
    assert np.isfinite(product).all()


def test_vmap_is_a_loop():
    ws, xs = np.stack([A["w"], 300 * A["w"]]), np.stack([A["x"], -A["x"]])
    fn = jax.jit(jax.value_and_grad(loss(nv(layer)), (0, 1)))
    looped = jax.tree.map(lambda *x: np.stack(x), *(fn(w, x) for w, x in zip(ws, xs, strict=True)))
    both = jax.jit(jax.vmap(fn))(ws, xs)
    chex.assert_trees_all_close(both, looped, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_shows(bad):
    x = A["x"].copy()
    x[3, 5] = bad
    assert not np.isfinite(jax.jit(nv(layer))(A["w"], x)).any()


def test_float16_and_sizes_without_whole_blocks():
    assert (
        relative_error(jax.jit(nv(layer, dtype=jnp.float16))(A["w"], A["x"]), A["x"] @ A["w"]) < 0.2
    )
    causes = lambda w, x: [row.cause for row in explain(nv(layer), w, x).rows]
    assert causes(A["w"], A["x"]) == ["operand 1 is a weight, 4 bits, scales of 16 elements"]
    assert causes(A["w"][:56], A["x"][:, :56]) == [
        "dimension 1 of operand 0, 56, is no multiple of 16"
    ]


def test_what_a_gpu_gets_and_which_do_not(monkeypatch):
    device = lambda *args: monkeypatch.setattr(units, "default_device", lambda: Device(*args))
    low = nv(layer, emulate=False)
    device("gpu", "NVIDIA B200", "10.0")
    with jax.check_tracer_leaks(False):
        traced = jax.jit(jax.grad(loss(low), (0, 1))).trace(A["w"], A["x"])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__op$block_scaled_dot") == 1
    assert text.count("dot_general") == 2
    device("gpu", "NVIDIA H100", "9.0")
    with pytest.warns(UserWarning, match="NVIDIA H100 has no units for NVFP4.*emulate=True"):
        explain(low, A["w"], A["x"])
