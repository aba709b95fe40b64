"""Batching rules of the user's own stay in force where the autocasted function is batched.

The rules here are wrong on purpose, by a factor of three, so that one that was lost would show.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .test_custom_rules import check

X = np.random.default_rng(0).standard_normal((3, 8, 8), np.float32)
W = np.random.default_rng(1).standard_normal((3, 8, 8), np.float32) / 3


def layer(x, w):
    return jnp.sin(x @ w), x


@jax.custom_batching.custom_vmap
def sin_dot(x, w):
    return layer(x, w)


@sin_dot.def_vmap
def _(size, batched, x, w):
    y, same = jax.vmap(layer, in_axes=[0 if b else None for b in batched])(x, w)
    return (3 * y, same), (True, True)


PROGRAMS = {
    "itself": sin_dot,
    "jit": jax.jit(sin_dot),
    "after_a_dot": lambda x, w: sin_dot(x @ w, w),
}
AXES = [(0, 0), (0, None), (None, 0)]


def arguments(axes):
    return [a if axis == 0 else a[0] for a, axis in zip((X, W), axes, strict=True)]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_rule_is_in_force(program, axes):
    check(lambda cast: jax.vmap(cast(program), axes), *arguments(axes), dtype="bfloat16")


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_its_gradient(axes):
    def gradient(cast):
        batched = jax.vmap(cast(sin_dot), axes)
        return jax.grad(lambda x, w: jnp.mean(batched(x, w)[0] ** 2), (0, 1))

    check(gradient, *arguments(axes))


def test_batched_twice():
    """Outside the rule, which was batched once, comes JAX's own batching of what it did."""
    twice = lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))
    check(lambda cast: twice(cast(sin_dot)), X, W)


def test_a_product_that_the_rule_alone_has():
    @jax.custom_batching.custom_vmap
    def product(x, w):
        return jnp.sum(jnp.expand_dims(x, 1) * w, axis=0)

    @product.def_vmap
    def rule(size, batched, x, w):
        return x @ w, True

    rows, matrix = X.reshape(X.shape[0], -1), W.reshape(-1, W.shape[-1])
    rows = jnp.resize(rows, (8, matrix.shape[0]))
    check(lambda cast: jax.vmap(cast(product), (0, None)), rows, matrix, dtype="bfloat16")
