"""Where the distance of a sigmoid or tanh to 1 counts, it is computed in float32.

Each program has an error that products rounded to 16 bits explain: it is compared with the same
program with nothing else rounded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast, explain
from tests.support.numerics import relative_error

rng = np.random.default_rng(0)
X = rng.standard_normal((256, 32)).astype(np.float32)
W = (rng.standard_normal((32, 16)) * 32**-0.5).astype(np.float32)
U = (rng.standard_normal((32, 16)) * 32**-0.5).astype(np.float32)
V = (rng.standard_normal((16, 8)) * 0.12).astype(np.float32)


def near_one(matmul, params, bias=6.0):
    return jax.nn.sigmoid(0.3 * matmul(X, params[0]) + bias)


def scanned_decay(matmul, params):
    pairs = near_one(matmul, params), 0.01 * jax.nn.relu(matmul(X, params[1]))
    return lax.scan(lambda h, ab: (ab[0] * h + ab[1],) * 2, jnp.zeros(16), pairs)[1]


def decay_in_the_body(matmul, params):
    def body(h, x):
        gate = jax.nn.sigmoid(0.3 * matmul(x[None], params[0])[0] + 6.0)
        h = gate * h + (1 - gate) * jnp.tanh(matmul(x[None], params[1])[0])
        return h, h

    return lax.scan(body, jnp.zeros(16), X)[1]


def decay_of_a_while_loop(matmul, params):
    a = near_one(matmul, params)
    return lax.fori_loop(0, 256, lambda i, h: a[i] * h + 0.01, jnp.zeros(16))


def associative_decay(matmul, params):
    pairs = near_one(matmul, params), 0.01 * jax.nn.relu(matmul(X, params[1]))
    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    return lax.associative_scan(combine, pairs)[1]


def survival(matmul, params):
    return jnp.cumprod(near_one(matmul, params), 0)


def product(matmul, params):
    return jnp.prod(near_one(matmul, params), 0)


def mean_of_instances(matmul, params):
    return -jnp.log(1 - jnp.mean(near_one(matmul, params), 0))


def dice(matmul, params):
    q = near_one(matmul, params)
    return 1 - (2 * jnp.sum(q) + 1) / (jnp.sum(q) + q.size + 1)


def root(matmul, params):
    return 1 - jnp.sqrt(jnp.mean(near_one(matmul, params)))


def flow_with_a_next_layer(matmul, params):
    y = jnp.tanh(3 * matmul(X, params[0]))
    return jnp.sum(jnp.log(1 - y**2 + 1e-6), -1) + jnp.sum(matmul(y, params[2]), -1)


PROGRAMS = {
    function.__name__: function
    for function in (
        scanned_decay,
        decay_in_the_body,
        decay_of_a_while_loop,
        associative_decay,
        survival,
        product,
        mean_of_instances,
        dice,
        root,
        flow_with_a_next_layer,
    )
}


def rounded(dtype, x, y):
    return jnp.matmul(x.astype(dtype), y.astype(dtype)).astype(jnp.float32)


def value_and_gradient(fn):
    """The outputs, and their derivative along one direction of them."""

    def loss(params):
        out = fn(params)
        return jnp.mean(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    gradient, out = jax.jit(jax.grad(loss, has_aux=True))([W, U, V])
    return out, gradient[0]


# In a cell at level "compute" the gates are 16 bits by intent, as with `dtype=` by hand.
CASES = {
    f"{name}-{level}": (program, level)
    for name, program in PROGRAMS.items()
    for level in ("o1", "compute")
    if (program, level) != (decay_in_the_body, "compute")
}


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("program", "level"), CASES.values(), ids=CASES)
def test_the_error_is_that_of_the_products(program, level, policy):
    exact = value_and_gradient(functools.partial(program, jnp.matmul))
    by_products = functools.partial(rounded, policy.compute_dtype)
    least = value_and_gradient(functools.partial(program, by_products))
    mixed = autocast(functools.partial(program, jnp.matmul), policy=policy.with_level(level))
    for found, products, want in zip(value_and_gradient(mixed), least, exact, strict=True):
        assert np.all(np.isfinite(found))
        assert relative_error(found, want) <= 3 * relative_error(products, want) + 1e-6


def rows_of(fn, *args):
    return [row for row in explain(fn, *args, policy=BF16).rows if row.primitive == "logistic"]


def test_a_gate_of_16_bit_values_stays_in_16_bits():
    fn = lambda w, x: (jax.nn.sigmoid(x @ w) * (x @ w)) @ w.T
    assert [row.results for row in rows_of(fn, W, X)] == [("bfloat16",)]


def test_the_halves_of_a_product_are_no_factors_of_many_steps():
    def gated(w, x):
        left, right = jnp.split(jax.nn.sigmoid(x @ w), 2, -1)
        return (left * right) @ w[:8]

    assert [row.results for row in rows_of(gated, W, X)] == [("bfloat16",)]


def test_the_slope_of_a_tanh_in_a_gradient_raises_nothing():
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w.T)
    report = explain(jax.grad(loss), W, X, policy=BF16)
    assert [r.results for r in report.rows if r.primitive == "tanh"] == [("bfloat16",)]


def test_a_product_of_two_numbers_has_no_factors():
    """Beside a strided slice it ended in a ValueError."""
    program = lambda x: x[::2] * lax.mul(2.0, 3.0) + x[1::2]
    np.testing.assert_array_equal(autocast(program)(X[0]), jax.jit(program)(X[0]))
