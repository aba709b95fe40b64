"""Masks of `finfo(float32).min`: the lowest bfloat16 number, never -inf, and no NaN behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from tests.support.jaxprs import find, trace
from tests.support.plans import LOWEST

N = 8
CAUSAL = np.tril(np.ones((N, N), bool))
NO_KEYS = CAUSAL & (np.arange(N) != 3)[:, None]  # row 3 is masked throughout
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(N, 8)), jnp.float32)

LOWESTS = np.full((N, N), LOWEST, np.float32)
BIAS = np.where(CAUSAL, 0, LOWESTS)
BIAS[0, -1] = -np.inf

MASKED = {
    "where": lambda s, m: jnp.where(m, s, LOWEST),
    "select": lambda s, m: lax.select(m, s, jnp.full_like(s, LOWEST)),
    "under_jit": lambda s, m: jax.jit(lambda s, low: jnp.where(m, s, low))(s, LOWEST),
    "maximum_of_a_row": lambda s, m: jnp.where(m, s, jnp.finfo(s.dtype).min),
    "added": lambda s, m: s + jnp.where(m, 0.0, LOWEST),
    "from_integers": lambda s, m: s + (1.0 - m.astype(jnp.int32).astype(jnp.float32)) * LOWEST,
    "twice": lambda s, m: jnp.where(m, jnp.where(m, s, LOWEST), LOWEST),
    "constant": lambda s, m: jnp.where(m, s, LOWESTS),
    "constant_under_jit": lambda s, m: jax.jit(lambda s, low: jnp.where(m, s, low))(s, LOWESTS),
    "constant_added": lambda s, m: jnp.where(m, (jnp.broadcast_to(s, (2, N, N)) + BIAS)[0], LOWEST),
    "constant_in_a_loop": lambda s, m: lax.scan(
        lambda h, _: (jnp.where(m, h, LOWESTS), None), s, length=2
    )[0],
}


def attention(mask):
    def fn(w, x, m):
        q = x @ w
        return jax.nn.softmax(mask(q @ q.T, m)) @ q

    return fn


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MASKED)
def test_masked_rows_are_those_of_float32(name, dtype):
    fn = attention(MASKED[name])
    low = autocast(fn, dtype, params=0)

    def value_and_gradient(fn):
        out, vjp = jax.vjp(lambda w: fn(w, X, NO_KEYS), W)
        return out, *vjp(out)

    found = jax.jit(lambda: value_and_gradient(low))(), jax.jit(lambda: value_and_gradient(fn))()
    for ours, theirs in zip(*found, strict=True):
        atol = 16 * float(jnp.finfo(dtype).eps) * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


STORED = ["where", "select", "under_jit", "maximum_of_a_row", "twice"]
STORED += ["constant", "constant_under_jit"]


@pytest.mark.parametrize("name", STORED)
def test_masked_scores_are_stored_in_bfloat16(name):
    jaxpr = trace(autocast(attention(MASKED[name]), "bfloat16"), W, X, CAUSAL)
    selects = find(jaxpr, "select_n")
    assert {eqn.outvars[0].aval.dtype.name for eqn in selects} == {"bfloat16"}
    # float16 ends at 65,504: there -65,504 would be a score like others.
    jaxpr = trace(autocast(attention(MASKED[name]), "float16"), W, X, CAUSAL)
    assert {eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "select_n")} == {"float32"}


def test_an_infinite_mask_stays_infinite():
    fn = lambda w, x, m: jnp.where(m, (x @ w) @ x.T, -jnp.inf)
    out = autocast(fn, "bfloat16")(W, X, CAUSAL)
    np.testing.assert_array_equal(np.isneginf(out), ~CAUSAL)


def test_infinite_elements_of_a_constant_stay_infinite():
    mixed = np.where(np.eye(N), -np.inf, LOWESTS)
    fn = lambda w, x, m: jnp.where(m, (x @ w) @ x.T, mixed)
    for call in (fn, lambda w, x, m: jax.jit(lambda mixed: fn(w, x, m))(mixed)):
        out = autocast(call, "bfloat16")(W, X, np.zeros((N, N), bool))
        np.testing.assert_array_equal(np.isneginf(out), np.isneginf(mixed))


def test_a_running_maximum_starts_finite():
    """The online softmax: `exp(old - new)` of two infinities would be NaN."""

    def fn(w, xs):
        def step(carry, x):
            largest, total = carry
            score = (x @ w).max()
            new = jnp.maximum(largest, score)
            return (new, total * jnp.exp(largest - new) + jnp.exp(score - new)), None

        return lax.scan(step, (jnp.float32(LOWEST), jnp.float32(0)), xs)[0]

    largest, total = autocast(fn, "bfloat16")(W, X[:, None])
    expected = fn(W, X[:, None])
    np.testing.assert_allclose((largest, total), expected, rtol=2e-2)
