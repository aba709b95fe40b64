"""What autocast does not look into gets the dtypes that the program declares; loops keep theirs."""

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, dtypes, find

W = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3
SPD = W @ W.T + np.eye(8, dtype=np.float32)


def half(fn, **options):
    return autocast(fn, jnp.bfloat16, **options)


def check(fn, *args, tolerance=3e-2):
    """Types and values; returns the jaxpr."""
    found, plain = jax.jit(half(fn)).trace(*args), jax.jit(fn).trace(*args)
    assert found.out_info == plain.out_info
    # Most of the time of these tests is LLVM's.
    options = {"xla_backend_optimization_level": 0}
    values, expected = (t.lower().compile(options)(*args) for t in (found, plain))
    for a, b in zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(v).astype(np.complex128) for v in (a, b))
        np.testing.assert_array_less(np.abs(a - b), tolerance * np.max(np.abs(b), initial=1e-3))
    return found.jaxpr


# --- references ----------------------------------------------------------------------------------


def accumulate(x):
    ref = jax.new_ref(jnp.zeros((8, 8)))

    def body(carry, _):
        ref[...] = ref[...] + x @ W
        ref[0] += jnp.float32(1)
        return carry, None

    lax.scan(body, jnp.float32(0), None, length=3)
    return ref[...] @ W


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["f", "jit"])
def test_references_keep_their_dtype(wrap):
    jaxpr = check(wrap(accumulate), W)
    assert_dots_run_in("bfloat16", jaxpr)
    for eqn in find(jaxpr, "swap", "addupdate"):
        assert eqn.invars[1].aval.dtype == jnp.float32


def test_a_reference_as_argument():
    def fn(ref, x):
        ref[...] = ref[...] + x @ W
        return ref[...] @ W

    plain, mixed = jax.new_ref(jnp.ones((8, 8))), jax.new_ref(jnp.ones((8, 8)))
    out, expected = jax.jit(half(fn))(mixed, W), jax.jit(fn)(plain, W)
    np.testing.assert_allclose(out, expected, atol=5e-2)
    np.testing.assert_allclose(mixed[...], plain[...], atol=3e-2)
    assert mixed.dtype == jnp.float32


def test_a_reference_closed_over():
    ref = jax.new_ref(jnp.zeros((8, 8)))

    def fn(x):
        ref[...] = x @ W

    jax.jit(half(fn))(W)
    np.testing.assert_allclose(ref[...], W @ W, atol=3e-2)


# --- calls out of the program --------------------------------------------------------------------


def test_composites_keep_declared_dtypes():
    composite = lax.composite(lambda x: x @ W, name="my.composite")
    (eqn,) = find(check(lambda x: composite(x @ W) @ W, W), "composite")
    assert dtypes(eqn.invars)[-1:] == dtypes(eqn.outvars) == ("float32",)


def test_custom_linear_solve_keeps_declared_dtypes():
    def fn(b):
        solve = lambda matvec, b: jnp.linalg.solve(SPD, b)
        return lax.custom_linear_solve(lambda v: SPD @ v, b @ W, solve, symmetric=True)

    jaxpr = check(jax.grad(lambda b: jnp.sum(fn(b) ** 2)), W)
    for eqn in find(jaxpr, "custom_linear_solve"):
        assert "bfloat16" not in dtypes((*eqn.invars, *eqn.outvars))


OTHERS = {
    "scatter_set": lambda x: (x @ W).at[1:3, 0].set(jnp.float32(2)) @ W,
    "platform_dependent": lambda x: lax.platform_dependent(x, default=lambda x: x @ W),
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_other_primitives_with_bodies_and_dtypes(fn):
    check(fn, W)


# --- random numbers ----------------------------------------------------------------------------


def draws(key, x):
    keys = jax.random.split(key, 3)
    mask = jax.random.bernoulli(keys[0], 0.5, x.shape)
    noise = jax.random.normal(keys[1], x.shape) + jax.random.uniform(keys[2], x.shape)
    return mask, noise, jax.random.fold_in(key, 3), jnp.where(mask, x @ W, noise)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_random_numbers_are_the_same(key):
    """Only the last value depends on a dot."""
    found, expected = half(draws)(key, W), draws(key, W)
    data = lambda k: jax.random.key_data(k) if k.dtype != jnp.uint32 else k
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    np.testing.assert_array_equal(data(found[2]), data(expected[2]))
    assert found[2].dtype == expected[2].dtype
    np.testing.assert_allclose(found[3], expected[3], atol=3e-2)
