"""Products in 8 bits over several devices: one scale for the whole array, values of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import Float8, Policy, autocast
from jmp_autocast.float8.carriers import row_major
from tests.support.float8_reference import rounded
from tests.support.jaxprs import find, trace
from tests.support.numerics import normal, relative_error

FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, skip=(), emulate=True))
K, F, M = 32, 64, 128
# Each shard of rows is 16 times as large as the one before: with the scale of all of them the first
# is lost in 8 bits.
A = normal(0, up=(K, F), down=(F, K), x=(M, K))
X = A["x"] * np.repeat(16.0 ** np.arange(8), M // 8)[:, None].astype(np.float32)
PARAMS = {"up": A["up"] / 8, "down": A["down"] / 8}
KINDS = {
    "data parallel": {"up": P(), "down": P()},
    "FSDP": {"up": P("d"), "down": P("d")},
    "tensor parallel": {"up": P(None, "d"), "down": P("d")},
}


def mlp(p, x):
    return jnp.maximum(x @ p["up"], 0) @ p["down"]


def mesh():
    return jax.make_mesh((8,), ("d",), (AxisType.Auto,))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_one_device(kind):
    low = autocast(mlp, policy=FP8, params=0)
    loss = lambda p, x: jnp.sum(jnp.sin(low(p, x)))
    step = jax.jit(lambda p, x: (low(p, x), jax.grad(loss, (0, 1))(p, x)))
    rows = P() if kind == "tensor parallel" else P("d")
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh(), spec))
    params = {name: place(w, KINDS[kind][name]) for name, w in PARAMS.items()}
    found, expected = step(params, place(X, rows)), step(PARAMS, X)
    # Devices add up in another order, and what is one step of 8 bits apart is rounded apart.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-3


def test_the_scale_is_of_the_whole_array_and_in_a_shard_map_of_the_shard():
    w = PARAMS["up"]
    low = autocast(lambda p, x: x @ p["up"], policy=FP8, params=0)
    place = jax.device_put(X, NamedSharding(mesh(), P("d")))
    whole = jax.jit(low)(PARAMS, place)
    mapped = jax.shard_map(low, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d"))
    shards = jax.jit(mapped)(PARAMS, X)
    of_whole = rounded(X) @ rounded(w)
    of_shards = np.concatenate([rounded(x) @ rounded(w) for x in np.split(X, 8)])
    first = slice(0, M // 8)
    for found, expected, other in ((whole, of_whole, of_shards), (shards, of_shards, of_whole)):
        np.testing.assert_allclose(found[first], expected[first], rtol=2**-8, atol=1e-9)
        assert relative_error(found[first], other[first]) > 0.1


def test_explicit_axes_stay_in_the_compute_dtype():
    explicit = jax.make_mesh((8,), ("d",), (AxisType.Explicit,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(explicit, spec))
    with jax.set_mesh(explicit):
        low = autocast(lambda p, x: x @ p["up"], policy=FP8, params=0)
        jaxpr = trace(low, {"up": place(A["up"], P())}, place(X, P("d")))
    assert not find(jaxpr, "float8_dot")


# --- `row_major`: a layout on one GPU alone ---------------------------------------------------

SMALL = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(("platform", "calls"), [("cpu", 0), ("tpu", 0), ("rocm", 0), ("cuda", 1)])
def test_a_layout_is_asked_for_on_one_nvidia_gpu_alone(platform, calls):
    traced = jax.jit(jax.vmap(row_major)).trace(SMALL)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@LayoutConstraint") == calls
    # XLA would gather the float32 array on each of several devices.
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.ShapeDtypeStruct(SMALL.shape, SMALL.dtype, sharding=NamedSharding(mesh, P("d")))
    lowered = jax.jit(row_major).trace(sharded).lower(lowering_platforms=(platform,))
    assert "LayoutConstraint" not in lowered.as_text()


def test_exported_programs_and_values():
    exported = jax.export.export(jax.jit(row_major), platforms=("cuda",))(SMALL)
    assert "LayoutConstraint" not in exported.mlir_module()
    np.testing.assert_array_equal(jax.jit(row_major)(SMALL), SMALL)
    gradient = jax.grad(lambda x: jnp.sum(row_major(x) * x))(SMALL)
    np.testing.assert_array_equal(gradient, 2 * SMALL)
