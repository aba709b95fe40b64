"""Equations that repeat are bound through an inlined jit where JAX differentiates or maps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast
from jmp_autocast.interpreters.primitives import cached_bind
from tests.support.jaxprs import trace

X = jnp.ones((8, 8))


def fn(w, x):
    x = jnp.tanh(x @ w) * 2.0
    x = jnp.tanh(x @ w) * 2.0
    x = jnp.tanh(x @ w) * 2.0
    x = jnp.tanh(x @ w) * 2.0
    return jnp.sum(x)


@pytest.fixture
def bound(monkeypatch):
    """The primitives that were bound through an inlined jit."""
    names = []
    original = cached_bind._bound_primitive

    def noted(primitive, *rest):
        names.append(primitive.name)
        return original(primitive, *rest)

    monkeypatch.setattr(cached_bind, "_bound_primitive", noted)
    return names


def test_a_trace_that_only_writes_a_jaxpr_takes_no_detour(bound):
    trace(autocast(fn, policy=BF16), X, X)
    assert bound == []


CASES = {"grad": (jax.grad, X), "vmap": (jax.vmap, X[None])}


@pytest.mark.parametrize(("transform", "x"), CASES.values(), ids=CASES)
def test_what_is_differentiated_or_mapped_is_bound_through_it(bound, transform, x):
    trace(transform(autocast(fn, policy=BF16)), x, x)
    assert {"tanh", "mul"} <= set(bound)


def test_an_array_of_numpy_beside_a_tracer_is_bound():
    def angles(x):
        return cached_bind.bind_cached(lax.atan2_p, [x, np.full((8, 8), 2.0, np.float32)], {})

    slopes = jax.grad(lambda x: jnp.sum(angles(x)))(X)
    chex.assert_trees_all_close(slopes, jax.grad(lambda x: jnp.sum(lax.atan2(x, 2 * X)))(X))
