"""Modes of JAX: NaNs and infinities as errors, and both modes of dtype promotion.

The whole suite runs under strict promotion; `jax_enable_x64` in a fresh process is in
`test_pickle.py`, by its context manager in the fuzzer's programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast

W = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3
DTYPES = ["float16", "bfloat16"]


@pytest.mark.parametrize("derivative", [lambda f: f, jax.grad, lambda f: jax.vmap(f)])
@pytest.mark.parametrize("is_off", [False, True], ids=["jit", "disable_jit"])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans_leaves_constants_in_peace(run, is_off, derivative):
    """`jnp.quantile` and `jnp.interp` broadcast a NaN that they do not choose."""

    def fn(x):
        h = x @ W
        steps = jnp.interp(jax.nn.relu(h), np.linspace(0, 1, 9), np.arange(9.0))
        return jnp.sum(jnp.where(h > 5, jnp.nan, steps)) + jnp.quantile(h, 0.3)

    x = W / 8 if derivative is jax.grad else np.stack([W, -W]) / 8
    with jax.debug_nans(True), jax.disable_jit(is_off):
        found = run(derivative(autocast(fn, jnp.bfloat16)))(x)
    assert np.isfinite(found).all()


def test_debug_infs_finds_an_overflow_of_float16():
    fn = lambda x: x @ abs(W)
    big = jnp.full((8, 8), 1e5)
    with jax.debug_infs(True):
        jax.jit(autocast(fn, jnp.bfloat16))(big)
        with pytest.raises(FloatingPointError, match=r"invalid value \(inf\)"):
            jax.jit(autocast(fn, jnp.float16))(big)


TOO_BIG = np.full((8, 8), 1e5, np.float32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ x,
        lambda x: jnp.asarray(TOO_BIG).astype(jnp.float16) + (x @ x).astype(jnp.float16),
    ],
    ids=["argument", "constant"],
)
def test_casting_a_numpy_array_to_infinity_gives_no_warning(fn):
    """JAX 0.12 casts it with NumPy, which warns; a warning is an error in this suite."""
    assert np.all(np.isinf(autocast(fn, jnp.float16)(TOO_BIG)))


MIXED = {
    "two_floats": lambda x: x.astype(jnp.bfloat16) + x @ W,
    "int_and_float": lambda x: jnp.arange(8) * (x @ W),
    "where": lambda x: jnp.where(x > 0, x.astype(jnp.float16), x @ W),
}


@pytest.mark.parametrize("name", MIXED)
def test_strict_promotion_refuses_what_it_refuses_without_autocast(name):
    """The casts of autocast hide no mistake and make none; in the standard mode types are equal."""
    errors = []
    for program in (MIXED[name], autocast(MIXED[name])):
        with pytest.raises(Exception, match="no available implicit dtype promotion") as caught:
            jax.eval_shape(program, W)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.eval_shape(MIXED[name], W)
        for dtype in DTYPES:
            assert jax.eval_shape(autocast(MIXED[name], dtype), W) == expected
