"""Where the distance of a sigmoid or tanh to 1 counts, it is computed in float32.

Each program has an error that products rounded to 16 bits explain: it is compared with the same
program with nothing else rounded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast, explain
from tests.support.jaxprs import find, trace
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


def mean_of_instances(matmul, params):
    return -jnp.log(1 - jnp.mean(near_one(matmul, params), 0))


def dice(matmul, params):
    q = near_one(matmul, params)
    return 1 - (2 * jnp.sum(q) + 1) / (jnp.sum(q) + q.size + 1)


def flow_with_a_next_layer(matmul, params):
    y = jnp.tanh(3 * matmul(X, params[0]))
    return jnp.sum(jnp.log(1 - y**2 + 1e-6), -1) + jnp.sum(matmul(y, params[2]), -1)


def differences_of_outputs(matmul, params):
    h = matmul(X, params[0])
    return jnp.tanh(h) - jnp.tanh(h + 0.02 * matmul(X, params[1]))


def centred(matmul, params):
    y = jax.nn.sigmoid(0.1 * matmul(X, params[0]) + 2.0)
    return y - jnp.mean(y, 0)


def versine(matmul, params):
    return 1 - jnp.cos(0.6) * jnp.cos(0.6 + 0.01 * matmul(X, params[0])) - jnp.sin(0.6) ** 2


def from_minus_one(matmul, params):
    return 2 * jax.nn.sigmoid(0.02 * matmul(X, params[0])) - 1


def normed(y):
    """A layer norm as a division by the standard deviation."""
    return (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-5)


def normed_offset(matmul, params):
    return normed(3 + 0.05 * matmul(X, params[0]))


def normed_maximum(matmul, params):
    return normed(jnp.maximum(3 + 0.05 * matmul(X, params[0]), 3 + 0.05 * matmul(X, params[1])))


def normed_film(matmul, params):
    scale, shift = matmul(X, params[0]), matmul(X, params[1])
    return normed((2 + 0.05 * scale) * (1 + 0.05 * shift))


def minus_their_largest(matmul, params):
    h = 0.1 * matmul(X, params[0]) + 3
    return h - lax.stop_gradient(h.max(-1, keepdims=True))


def minus_their_neighbours(matmul, params):
    h = 0.1 * matmul(X, params[0]) + 3
    return h - jnp.roll(h, 1, 0)


def by_a_stencil(matmul, params):
    h = 0.2 * jnp.tanh(matmul(X, params[0])) + 2
    return h @ jnp.asarray(np.eye(16) - np.roll(np.eye(16), 1, 0), jnp.float32)


def square_minus_one(matmul, params):
    return jax.nn.relu(1 + 0.05 * matmul(X, params[0])) ** 2 - 1


def silu_minus_its_operand(matmul, params):
    h = 4 + 0.1 * matmul(X, params[0])
    return jax.nn.silu(h) - h


def wave_of_an_offset(matmul, params):
    return jnp.sin(50 * (jnp.linspace(-1, 1, 16) + 0.01 * matmul(X, params[0])))


def changes_of_a_function(matmul, params):
    s = jnp.tanh(3 + 0.5 * matmul(X, params[0]))
    return jnp.where(s[1:] != jnp.maximum(s[1:], s[:-1]), s[1:], 0.0)


def consumed(program):
    """A product consumes the states, as the projection of a layer does."""

    def run(matmul, params):
        return matmul(program(matmul, params), params[2])

    run.__name__ = f"{program.__name__}_consumed"
    return run


PROGRAMS = {
    function.__name__: function
    for function in (
        scanned_decay,
        decay_in_the_body,
        decay_of_a_while_loop,
        associative_decay,
        survival,
        mean_of_instances,
        dice,
        flow_with_a_next_layer,
        *map(consumed, (scanned_decay, associative_decay, survival)),
        *map(consumed, (differences_of_outputs, centred, versine, from_minus_one)),
        *map(consumed, (normed_offset, normed_maximum, normed_film, minus_their_largest)),
        *map(consumed, (minus_their_neighbours, by_a_stencil, square_minus_one)),
        *map(consumed, (silu_minus_its_operand, wave_of_an_offset, changes_of_a_function)),
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


@functools.cache
def by_products_in(program, dtype):
    matmul = jnp.matmul if dtype is None else functools.partial(rounded, dtype)
    return value_and_gradient(functools.partial(program, matmul))


# At level "compute" the gates of a cell are 16 bits by intent, as with `dtype=` by hand, and so is
# a sum of two products.
CASES = {
    f"{name}-{level}": (program, level)
    for name, program in PROGRAMS.items()
    for level in ("o1", "compute")
    if level == "o1" or name not in ("decay_in_the_body", "differences_of_outputs_consumed")
}


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("program", "level"), CASES.values(), ids=CASES)
def test_the_error_is_that_of_the_products(program, level, policy):
    exact, least = (by_products_in(program, dtype) for dtype in (None, policy.compute_dtype))
    mixed = autocast(
        functools.partial(program, jnp.matmul), policy=dataclasses.replace(policy, level=level)
    )
    for found, products, want in zip(value_and_gradient(mixed), least, exact, strict=True):
        assert np.all(np.isfinite(found))
        assert relative_error(found, want) <= 3 * relative_error(products, want) + 1e-6


def halves(w, x):
    """No factors of many steps."""
    left, right = jnp.split(jax.nn.sigmoid(x @ w), 2, -1)
    return (left * right) @ w[:8]


def decay(w, x):
    gate = jax.nn.sigmoid(x @ w)
    return (gate * (x @ w + x @ -w) + x @ w) @ w.T, gate @ w.T


GATES = {
    "gate": (lambda w, x: (jax.nn.sigmoid(x @ w) * (x @ w)) @ w.T, "logistic", "bfloat16"),
    "halves": (halves, "logistic", "bfloat16"),
    "slope": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w.T)), "tanh", "bfloat16"),
    "decay": (decay, "logistic", "float32"),
    "pooled": (lambda w, x: jnp.tanh(x @ w).reshape(16, 16, 16).max(1) @ w.T, "tanh", "float32"),
    "pooled waves": (
        lambda w, x: jnp.cos(x @ w).reshape(16, 16, 16).max(1) @ w.T,
        "cos",
        "bfloat16",
    ),
    "few": (lambda w, x: jnp.tanh(x @ w[:, :4]) @ w.T[:4], "tanh", "float32"),
}


@pytest.mark.parametrize(("fn", "primitive", "dtype"), GATES.values(), ids=GATES)
def test_gates(fn, primitive, dtype):
    """A gate is 16 bits for a large product, unless it scales an accumulator or is a maximum."""
    rows = explain(fn, W, X, policy=BF16).rows
    assert [r.results for r in rows if r.primitive == primitive] == [(dtype,)]


def test_a_product_of_two_numbers_has_no_factors():
    """Beside a strided slice it ended in a ValueError."""
    program = lambda x: x[::2] * lax.mul(2.0, 3.0) + x[1::2]
    np.testing.assert_array_equal(autocast(program)(X[0]), jax.jit(program)(X[0]))


# --- what is subtracted from 1: a gate next to 1 lets something through --------------------------

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# From 4 to 8, by products that are exact.
EYE, FAR = jnp.eye(8), jnp.asarray(np.linspace(4, 8, 64).reshape(8, 8), jnp.float32)


def gate(f, scale=1.0):
    def fn(w, x):
        a = f((x @ w) * scale)
        return (1 - a) * (x @ w) + a * 0.0

    return fn


def tail(f, scale):
    return lambda w, x: (1 - f((x @ w) * scale)) * (x @ w)


LEFT_OF_ONE = {
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
@pytest.mark.parametrize("name", LEFT_OF_ONE)
def test_what_is_left_of_one_keeps_its_digits(name, dtype):
    fn = LEFT_OF_ONE[name]
    low = autocast(fn, dtype, params=0)
    derived = lambda fn: jax.value_and_grad(lambda x: jnp.sum((out := fn(EYE, x)) * jnp.abs(out)))
    jaxpr = trace(low, EYE, FAR)
    assert {eqn.outvars[0].aval.dtype for eqn in find(jaxpr, "sub")} == {jnp.dtype("float32")}
    for ours, theirs in zip(jax.jit(derived(low))(FAR), jax.jit(derived(fn))(FAR), strict=True):
        # An error of 2**-9 of an operand of 8 is one of 2 % in the exponential, and the product of
        # two such results, of 1e-7, is a subnormal number of float16.
        np.testing.assert_allclose(ours, theirs, rtol=16 * EPS[dtype], atol=3e-8)
