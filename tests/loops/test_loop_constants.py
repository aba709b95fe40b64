"""What is computed before a loop and read in each step: its gradient adds up in float32."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import BF16, Policy, autocast
from tests.support.jaxprs import assert_dots_run_in, casts, find, trace

STEPS = 2048
W = jax.random.normal(jax.random.key(0), (8, 8))
# One large term and many that a 16-bit sum would drop.
XS = jnp.full((STEPS, 1, 8), 2.0**-9).at[0].set(4.0)

MAKERS = {
    "parameter": (lambda w: w, 1e-6),
    "normalized": (lambda w: w / jnp.sqrt(jnp.sum(w * w)), 1e-6),
    "exponential": (jnp.exp, 1e-6),
    "product": (lambda w: w @ w, 1e-2),
    "bounded_product": (lambda w: jnp.tanh(w @ w), 1e-2),
}

POLICIES = {
    "tensor_cores": Policy(jnp.bfloat16, level="tensor_cores"),
    "o1": BF16,
    "compute": Policy(jnp.bfloat16, level="compute"),
    "by_hand": Policy(jnp.bfloat16, level="by_hand"),
}


def loop_over(make):
    def fn(w, xs):
        v = make(w)
        return lax.scan(lambda t, x: (t + jnp.sum(x @ v), None), jnp.float32(0), xs)[0]

    return fn


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("make", "tolerance"), MAKERS.values(), ids=MAKERS)
def test_gradient_of_what_a_loop_reads(make, tolerance, policy):
    fn = loop_over(make)
    expected = jax.grad(fn)(W, XS)
    found = jax.grad(autocast(fn, policy=policy))(W, XS)
    assert found.dtype == jnp.float32
    assert jnp.linalg.norm(found - expected) < tolerance * jnp.linalg.norm(expected)


@pytest.mark.parametrize(("make", "tolerance"), MAKERS.values(), ids=MAKERS)
def test_its_cast_is_outside(make, tolerance):
    jaxpr = trace(autocast(loop_over(make), policy=BF16), W, XS)
    (loop,) = find(jaxpr, "scan")
    assert_dots_run_in("bfloat16", loop.params["jaxpr"])
    assert not casts(loop.params["jaxpr"], "float32", "bfloat16")


SLICES = {
    "data": (lambda w, xs: (xs, w), "bfloat16"),
    "computed": (lambda w, xs: (xs @ w, w), "bfloat16"),
    "parameters": (lambda w, xs: (w.reshape(8, 1, 8), xs[0].T), "float32"),
}


@pytest.mark.parametrize(("make", "expected"), SLICES.values(), ids=SLICES)
def test_the_cast_of_what_a_loop_reads_slice_by_slice(make, expected):
    """Before the loop, but for stacked parameters: a copy of all layers never exists at once."""

    def fn(w, xs):
        slices, v = make(w, xs)
        return lax.scan(lambda _, x: (None, x @ v), None, slices)[1]

    (loop,) = find(trace(autocast(fn, policy=BF16, params=0), W, XS[:8]), "scan")
    assert loop.invars[-1].aval.dtype == expected
