"""`1 - sigmoid(x)` in 16 bits is `sigmoid(-x)`: a gate next to 1 still lets something through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, compare, full_precision
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
    assert not find(jaxpr, "sub")
    for ours, theirs in zip(
        jax.jit(value_and_gradient(low))(X), jax.jit(value_and_gradient(fn))(X), strict=True
    ):
        # An error of 2**-9 of an operand of 8 is one of 2 % in the exponential, and the product of
        # two such results, of 1e-7, is a subnormal number of float16.
        np.testing.assert_allclose(ours, theirs, rtol=16 * EPS[dtype], atol=3e-8)


def scoped(w, x):
    with full_precision():
        return 1 - jax.nn.sigmoid(x @ w)


UNCHANGED = {
    "asked_for_float32": (scoped, BF16),
    "another_number": (lambda w, x: (2 - jax.nn.sigmoid(x @ w)) * (x @ w), BF16),
    "another_order": (lambda w, x: (jax.nn.sigmoid(x @ w) - 1) * (x @ w), BF16),
    "rule_for_sub": (gate(jax.nn.sigmoid), BF16.with_rules({"sub": "FP32"})),
    "level_tensor_cores": (gate(jax.nn.sigmoid), BF16.with_level("tensor_cores")),
    "rule_for_logistic": (gate(jax.nn.sigmoid), BF16.with_rules({"logistic": "FP32"})),
    "declared_low": (
        lambda w, x: (1 - jax.nn.sigmoid((x @ w).astype(jnp.bfloat16))) * jnp.bfloat16(2),
        BF16,
    ),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_differences_are_what_they_were(name):
    fn, policy = UNCHANGED[name]
    assert len(find(trace(autocast(fn, policy=policy), W, X), "sub")) == 1


def test_a_complement_in_float32_has_digits_as_well():
    """In float32, too, 1 less a sigmoid of 20 is 0, and its logarithm infinite."""
    fn = lambda w, x: jnp.log(1 - jax.nn.sigmoid(4 * (x @ w)))
    found = autocast(fn, policy=BF16, params=0)(W, X)
    np.testing.assert_allclose(found, jax.nn.log_sigmoid(-4 * X), rtol=2 * EPS["bfloat16"])


def test_compare_measures_what_runs():
    comparison = compare(gate(jax.nn.sigmoid), W, X, policy=BF16)
    row = [row for row in comparison.rows if row.primitive == "logistic"][-1]
    assert row.introduced < 2 * EPS["bfloat16"]
    assert row.error < 16 * EPS["bfloat16"]
