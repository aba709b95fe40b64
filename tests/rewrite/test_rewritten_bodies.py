"""The jaxprs that an equation holds, rewritten: nested deeply, and kept from call to call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast
from tests.support.jaxprs import dot_dtypes
from tests.support.threads import at_once

W = jnp.eye(8) + 0.1
STACK = jnp.stack([W] * 3)
X = jnp.sin(jnp.arange(32.0)).reshape(4, 8)


# --- nested deeply ---------------------------------------------------------------------------


def nested(levels, wrap):
    def innermost(x):
        return jnp.tanh(x @ W)

    fn = innermost
    for _ in range(levels):
        fn = wrap(lambda x, fn=fn: fn(x) * 1.01)
    return fn


def in_a_branch(fn):
    return lambda x: lax.cond(x[0, 0] > -2, fn, lambda x: x, x)


def in_a_loop(fn):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=1)[0]


WRAPS = {"jit": (jax.jit, 90), "checkpoint": (jax.checkpoint, 90), "scan": (in_a_loop, 50)}
WRAPS["cond"] = (in_a_branch, 50)


@pytest.mark.parametrize(("wrap", "levels"), WRAPS.values(), ids=WRAPS)
def test_nested_deeply(wrap, levels):
    """A thread has a stack of its own, without the frames of pytest."""
    fn = nested(levels, wrap)
    job = functools.partial(jax.make_jaxpr(autocast(fn, policy=BF16)), X)
    jaxpr = at_once({"deep": job})["deep"]
    assert dot_dtypes(jaxpr) == [("bfloat16", "bfloat16", "bfloat16")]


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_nested_calls_have_the_values_of_few(wrap):
    """More levels than are made innermost first, and as many calls without a level."""
    deep, flat = (
        jax.jit(jax.value_and_grad(lambda x, fn=fn: autocast(fn, policy=BF16)(x).sum()))(X)
        for fn in (nested(20, wrap), nested(20, lambda fn: fn))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), deep, flat)
