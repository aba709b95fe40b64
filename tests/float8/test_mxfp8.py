"""Products in MXFP8: 32 elements along what a product sums over share a scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import Float8, Policy, autocast, explain
from jmp_autocast.backend import Device
from jmp_autocast.float8 import units
from tests.support import float8_reference as reference
from tests.support.jaxprs import find, trace
from tests.support.numerics import normal, relative_error

K, M, N = 64, 64, 96
A = normal(0, x=(M, K), w=(K, N), g=(M, N), square=(K, K))


def mx(fn, output_dtype="same", emulate=True, **options):
    recipe = Float8(
        minimum=16, skip=(), emulate=emulate, scaling="mx", **{"gradient": "e4m3"} | options
    )
    policy = Policy(jnp.bfloat16, matmul=recipe)
    return autocast(fn, policy=policy, params=0, output_dtype=output_dtype)


def layer(w, x):
    return x @ w


def loss(fn):
    return lambda w, x: jnp.sum(jnp.sin(fn(w, x) / 4))


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_values_and_gradients_are_those_of_the_recipe(gradient):
    fn = mx(layer, "computed", gradient=gradient)
    run = jax.jit(lambda w, x, g: (lambda y, pull: (y, *pull(g)))(*jax.vjp(fn, w, x)))
    # Blocks of all sizes, along both dimensions.
    x, w = (
        a * np.geomspace(1e-6, 1e6, a.shape[0], dtype=np.float32)[:, None] for a in (A["x"], A["w"])
    )
    y, dw, dx = run(w, x, A["g"].astype(jnp.bfloat16))
    format8 = {"e5m2": reference.E5M2, "e4m3": reference.E4M3}[gradient]
    expected = reference.layer_in_blocks(x, w, A["g"], format8)
    sums = reference.layer_in_blocks(*map(np.abs, (x, w, A["g"])), format8)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    tolerances = 2**-8, 2**-8, 1e-6  # of 16 bits twice, and of a sum in float32
    for found, exact, whole, tolerance in zip((y, dx, dw), expected, sums, tolerances, strict=True):
        assert (np.abs(np.asarray(found, np.float64) - exact) <= tolerance * whole).all()


def test_what_is_kept_has_8_bits():
    _, pull = jax.vjp(mx(layer, "computed"), A["w"], A["x"])
    kept = [x for x in jax.tree.leaves(pull) if np.any(np.asarray(x, np.float32))]
    shapes = {(x.dtype.name, x.shape) for x in kept if x.dtype.itemsize == 1}
    assert shapes == {("float8_e4m3fn", (K, N)), ("float8_e4m3fn", (M, K))}
    assert {x.shape for x in kept if x.dtype == jnp.float32} <= {(K, N // 32), (M // 32, K)}


def over_layers(w, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, -w]))[0]


def again(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(w, x)


def heads(w, x):
    y = jnp.einsum("btd,dhk->bthk", x.reshape(2, 32, K), w.reshape(K, 2, 32))
    return jnp.einsum("bthk,hkd->btd", jnp.tanh(y), w.reshape(2, 32, K)).reshape(M, K)


@pytest.mark.parametrize("fn", [over_layers, again, heads])
def test_through_what_jax_does_to_programs(fn):
    low, w, x = loss(mx(fn)), A["square"] / 8, A["x"]
    jaxpr = trace(jax.grad(low), w, x)
    assert find(jaxpr, "float8_dot")
    assert not [e for e in find(jaxpr, "dot_general") if e.invars[0].aval.dtype.itemsize > 1]
    exact = jax.grad(loss(fn))(w, x)
    assert relative_error(jax.jit(jax.grad(low))(w, x), exact) < 0.1
    tangent = jax.jit(lambda w: jax.jvp(lambda w: low(w, x), (w,), (exact,)))(w)[1]
    assert relative_error(tangent, np.vdot(exact, exact)) < 0.05


@pytest.mark.parametrize("wgrad", ["float8", "compute"])
def test_second_derivatives(wgrad):
    w, x = A["w"] / 8, A["x"]
    low, full = loss(mx(layer, wgrad=wgrad)), loss(layer)
    product = lambda fn: lambda w, x: jax.jvp(jax.grad(fn, (0, 1)), (w, x), (w, x))[1]
    reverse = lambda fn: jax.grad(lambda w, x: jnp.sum(jax.grad(fn)(w, x) ** 2), (0, 1))
    for derivative in (product, reverse):
        found, exact = jax.jit(derivative(low))(w, x), derivative(full)(w, x)
        for a, b in zip(found, exact, strict=True):
            assert relative_error(a, b) < 0.1


def test_vmap_is_a_loop():
    ws, xs = np.stack([A["w"], 3 * A["w"]]), np.stack([A["x"], -A["x"]])
    fn = jax.jit(jax.value_and_grad(loss(mx(layer)), (0, 1)))
    looped = [fn(w, x) for w, x in zip(ws, xs, strict=True)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *looped)
    chex.assert_trees_all_equal(jax.jit(jax.vmap(fn))(ws, xs), stacked)
    whole = lambda fn: jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, xs) ** 2))(ws[0] / 8)
    assert relative_error(whole(mx(layer)), whole(layer)) < 0.1


def test_sizes_without_whole_blocks_stay_in_the_compute_dtype():
    causes = lambda w, x: [row.cause for row in explain(mx(layer), w, x).rows]
    assert causes(A["w"], A["x"]) == ["operand 1 is a weight, scales of 32 elements"]
    assert causes(A["w"], A["x"][:48]) == ["dimension 0 of operand 0, 48, is no multiple of 32"]
    (cause,) = causes(A["w"][:, :48], A["x"])
    assert cause == "dimension 1 of operand 1, 48, is no multiple of 32"


def test_what_a_gpu_gets_and_which_do_not(monkeypatch):
    device = lambda *args: monkeypatch.setattr(units, "default_device", lambda: Device(*args))
    low = mx(layer, emulate=False)
    device("gpu", "NVIDIA B200", "10.0")
    # What JAX partitions by a rule of its own, `scaled_matmul`, holds tracers in a cycle.
    with jax.check_tracer_leaks(False):
        traced = jax.jit(jax.grad(loss(low), (0, 1))).trace(A["w"], A["x"])
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__op$block_scaled_dot") == 3
    assert "dot_general" not in lowered.as_text()
    for args, fix in ((("gpu", "NVIDIA H100", "9.0"), 'scaling="row"'), (("cpu", "cpu"), "Leave")):
        device(*args)
        with pytest.warns(
            UserWarning, match=f"{args[1]} has no units for MXFP8.*{fix}.*emulate=True"
        ):
            rows = explain(low, A["w"], A["x"]).rows
        assert [row.cause for row in rows] == [f"{args[1]} has no units for MXFP8"]
