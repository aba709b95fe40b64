"""Haiku needs no adapter: `autocast` of what `hk.transform` returns, and scopes for parts."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast
from tests.support.jaxprs import dot_dtypes, trace

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
KEY = jax.random.key(0)
TOLERANCE = 3e-2
LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3

bf16 = functools.partial(autocast, policy=jnp.bfloat16)


# Haiku's moving averages add integers to floats.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def encoder(x):
    return jnp.tanh(hk.Linear(5, name="encoder")(x))


def head(x):
    return hk.Linear(3, name="head")(x)


def test_transform_and_initialization():
    model = hk.without_apply_rng(hk.transform(lambda x: head(encoder(x))))
    params = jax.jit(model.init)(KEY, X)
    assert dot_dtypes(trace(bf16(model.apply), params, X)) == [LOW, LOW]
    got = jax.jit(bf16(model.init))(KEY, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, params)


# --- a part of a model ----------------------------------------------------------------------


def test_lift_lowers_a_part():
    """`hk.lift` leads parameters through an inner `transform`, whose apply is a pure function."""

    def forward(x):
        inner = hk.without_apply_rng(hk.transform(encoder))
        params = hk.lift(inner.init, name="inner")(
            hk.next_rng_key() if hk.running_init() else None, x
        )
        return head(bf16(inner.apply)(params, x))

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(KEY, X)
    assert set(params) == {"inner/encoder", "head"}
    assert dot_dtypes(trace(model.apply, params, X)) == [LOW, FULL]
