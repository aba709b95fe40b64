"""A sigmoid that is subtracted from 1 is float32: a gate next to 1 lets something through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, compare
from tests.support.jaxprs import find, trace

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
W = jnp.eye(4)
X = jnp.asarray(np.linspace(4, 8, 16).reshape(4, 4), jnp.float32)


def gate(f, scale=1.0):
    def fn(w, x):
        a = f((x @ w) * scale)
        return (1 - a) * (x @ w) + a * 0.0

    return fn


def tail(f, scale):
    return lambda w, x: (1 - f((x @ w) * scale)) * (x @ w)


PROGRAMS = {
    "sigmoid": gate(jax.nn.sigmoid),
    "float_literal": lambda w, x: (1.0 - jax.nn.sigmoid(x @ w)) * (x @ w),
    "read_again": lambda w, x: (1 - (a := jax.nn.sigmoid(x @ w))) @ w + 0 * (a @ w),
    "read_in_float32": lambda w, x: jnp.log(1 - (a := jax.nn.sigmoid(x @ w))) + 0 * (a @ w),
    "erf": tail(lax.erf, 0.25),
    "erfc": tail(lax.erfc, -0.25),
    "under_jit": jax.jit(gate(jax.nn.sigmoid)),
    "checkpointed": jax.checkpoint(gate(jax.nn.sigmoid)),
    "mapped": lambda w, x: jax.vmap(gate(jax.nn.sigmoid), (None, 0))(w, x[:, None])[:, 0],
    "in_a_loop": lambda w, x: lax.scan(
        lambda h, row: (h, gate(jax.nn.sigmoid)(w, row)), 0, x[:, None]
    )[1][:, 0],
}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_left_of_one_keeps_its_digits(name, dtype):
    fn = PROGRAMS[name]
    low = autocast(fn, compute_dtype=dtype, params=0)
    value_and_gradient = lambda fn: jax.value_and_grad(
        lambda x: jnp.sum((out := fn(W, x)) * jnp.abs(out))
    )
    jaxpr = trace(low, W, X)
    assert {eqn.outvars[0].aval.dtype for eqn in find(jaxpr, "sub")} == {jnp.dtype("float32")}
    for ours, theirs in zip(
        jax.jit(value_and_gradient(low))(X), jax.jit(value_and_gradient(fn))(X), strict=True
    ):
        # An error of 2**-9 of an operand of 8 is one of 2 % in the exponential, and the product of
        # two such results, of 1e-7, is a subnormal number of float16.
        np.testing.assert_allclose(ours, theirs, rtol=16 * EPS[dtype], atol=3e-8)


def test_compare_measures_what_runs():
    comparison = compare(gate(jax.nn.sigmoid), W, X, policy=BF16)
    row = [row for row in comparison.rows if row.primitive == "logistic"][-1]
    assert row.introduced < 2 * EPS["bfloat16"]
    assert row.error < 16 * EPS["bfloat16"]
