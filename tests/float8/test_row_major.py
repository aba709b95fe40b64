"""`row_major`: what it lowers to, by platform, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast.float8.carriers import row_major

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(("platform", "calls"), [("cpu", 0), ("tpu", 0), ("rocm", 0), ("cuda", 1)])
def test_a_layout_is_asked_for_on_one_nvidia_gpu_alone(platform, calls):
    traced = jax.jit(jax.vmap(row_major)).trace(X)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@LayoutConstraint") == calls
    # XLA would gather the float32 array on each of several devices.
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))
    lowered = jax.jit(row_major).trace(sharded).lower(lowering_platforms=(platform,))
    assert "LayoutConstraint" not in lowered.as_text()


def test_exported_programs_and_values():
    exported = jax.export.export(jax.jit(row_major), platforms=("cuda",))(X)
    assert "LayoutConstraint" not in exported.mlir_module()
    np.testing.assert_array_equal(jax.jit(row_major)(X), X)
    gradient = jax.grad(lambda x: jnp.sum(row_major(x) * x))(X)
    np.testing.assert_array_equal(gradient, 2 * X)
