"""float32 to 16 bits: to the nearest as a cast does, or with the right mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
