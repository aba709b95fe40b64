"""float32 to 16 and 8 bits: to the nearest as a cast does, or with the right mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast.optimizers.blocks import dequantized, quantized
from jmp_autocast.optimizers.rounding import stochastically, to_nearest

HALF = ("float16", "bfloat16")
# Normal and subnormal in float16, ties, both signs, and what is no number.
VALUES = np.float32(
    "0 -0.0 1 1.001 -1.001 1.00390625 1.00048828125 3e-5 -7e-6 5e-8 2.98023224e-8 8.94069672e-8 "
    "65504 60001 -3e4 inf -inf nan".split()
)


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_to_the_nearest_is_a_cast(dtype):
    draws = np.random.default_rng(0).standard_normal(4096) * 10.0 ** np.arange(-9, 7).repeat(256)
    x = np.concatenate([VALUES, draws.astype(np.float32)])
    x = x[~(np.abs(x) > 65504) | ~np.isfinite(x)]
    expected = x.astype(jnp.dtype(dtype)).astype(np.float32)
    rounded = jax.jit(to_nearest, static_argnums=1)(x, jnp.dtype(dtype))
    np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_stochastic_rounding_takes_a_neighbor_and_has_the_right_mean(dtype):
    finite = VALUES[np.isfinite(VALUES)]
    times = 1 << 14
    key, dtype = jax.random.key(0), jnp.dtype(dtype)

    @jax.jit
    def drawn(x):
        tiled = jnp.broadcast_to(x, (times, x.size))
        rounded = stochastically(key, tiled, dtype)
        # Means of differences: 65,504 and 5e-8 have no common scale.
        return rounded.min(0), rounded.max(0), jnp.mean(rounded - x, 0)

    low, high, bias = jax.device_get(drawn(finite))
    for bound in (low, high):
        np.testing.assert_array_equal(bound.astype(dtype).astype(np.float32), bound)
    assert (low <= finite).all()
    assert (finite <= high).all()
    # The standard error of a mean of 2**14 draws is at most 2**-8 of the distance of neighbors.
    np.testing.assert_array_less(np.abs(bias), (high - low) * 2.0**-6 + 1e-30)
    kept = to_nearest(finite, dtype) == finite
    np.testing.assert_array_equal(high[kept], low[kept])
    ends = jax.jit(stochastically, static_argnums=2)(key, VALUES[-3:], dtype)
    np.testing.assert_array_equal(ends, VALUES[-3:])


@pytest.mark.parametrize(
    ("shape", "kind"), [((64,), "signed"), ((3, 100), "unsigned"), ((2, 5, 7), "zero")]
)
def test_eight_bits_hold_an_array(shape, kind):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x = {"signed": x, "unsigned": x**2, "zero": x * 0}[kind]

    @jax.jit
    def coded(key, x):
        compressed = quantized(key, x, 32)
        return compressed, dequantized(compressed)

    compressed, back = coded(jax.random.key(0), x)
    assert compressed.values.dtype == jnp.uint8
    assert compressed.values.shape == shape
    assert compressed.scales.shape == (*shape[:-1], -(-shape[-1] // 32))
    # The widest distance of codes, that below the largest element, is 2 / 127 of it.
    np.testing.assert_allclose(back, x, atol=np.abs(x).max() * 2 / 127, rtol=0)
    assert ((np.asarray(back) > 0) | (x <= 0)).all() or kind == "signed"
    if kind != "zero":
        mean = jax.vmap(lambda key: coded(key, x)[1])(jax.random.split(jax.random.key(1), 512))
        # Draws of 512, each of a distance of at most 2 / 127: 4 standard errors.
        np.testing.assert_allclose(mean.mean(0), x, atol=np.abs(x).max() / 127 / 5, rtol=0)


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(("d",), None)])
@pytest.mark.parametrize("length", [512, 96])
def test_blocks_of_arrays_on_explicit_axes_lie_as_the_arrays(spec, length):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (16, length))
    split = jax.device_put(x, NamedSharding(mesh, spec))
    compress = jax.jit(lambda x: quantized(jax.random.key(1), x, 64))
    found = compress(split)
    for one, other in zip(found, compress(x), strict=True):
        np.testing.assert_array_equal(one, other)
    assert found.values.sharding.is_equivalent_to(split.sharding, 2)
    # Of 8 blocks of a row each device has one; 2 are on all of them.
    blocks = P() if spec == P(None, "d") and length == 96 else spec
    assert found.scales.sharding.is_equivalent_to(NamedSharding(mesh, blocks), 2)
    wide = jax.jit(dequantized)(found)
    assert wide.sharding.is_equivalent_to(split.sharding, 2)
    np.testing.assert_array_equal(wide, jax.jit(dequantized)(compress(x)))
