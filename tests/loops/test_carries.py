"""The carries of a scan: 16 bits where nothing adds up, float32 where it would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, Policy, autocast
from jmp_autocast.interpreters.compat import scan_split
from tests.support.jaxprs import find, trace

W = np.eye(8, dtype=np.float32)
X = np.ones((8, 8), np.float32)
ZEROS = jnp.zeros((8, 8))


def recurrent(activation):
    return lambda w, x: lax.scan(lambda h, _: (activation(x @ w + h @ w), None), ZEROS, length=3)


def lstm(w, x):
    def cell(carry, _):
        h, c = carry
        gate = jax.nn.sigmoid(x @ w + h @ w)
        c = gate * c + gate
        return (gate * jnp.tanh(c), c), None

    return lax.scan(cell, (ZEROS, ZEROS), length=3)


def scan_of(body, start=ZEROS):
    """``body(w, x, *carries)`` gives the next carries."""

    def fn(w, x):
        first = start(w, x) if callable(start) else start
        many = isinstance(first, tuple)

        def step(carry, _):
            return body(w, x, *carry) if many else body(w, x, carry), None

        return lax.scan(step, first, length=3)

    return fn


LOW, FULL = "bfloat16", "float32"

CARRIES = {
    "tanh": (recurrent(jnp.tanh), [LOW]),
    "relu": (recurrent(jax.nn.relu), [LOW]),
    "lstm": (lstm, [FULL, FULL]),
    "sum": (scan_of(lambda w, x, c: c + x @ w), [FULL]),
    "moving_average": (scan_of(lambda w, x, c: 0.9 * c + 0.1 * (x @ w)), [FULL]),
    "maximum": (scan_of(lambda w, x, c: jnp.maximum(c, x @ w)), [FULL]),
    "sum_under_jit": (scan_of(lambda w, x, c: jax.jit(jnp.add)(c, x @ w)), [FULL]),
    "sum_under_cond": (
        scan_of(lambda w, x, c: lax.cond(x[0, 0] > 0, jnp.add, jnp.subtract, c, x @ w)),
        [FULL],
    ),
    "sum_in_a_loop": (
        scan_of(lambda w, x, c: lax.fori_loop(0, 2, lambda _, c: c + x @ w, c)),
        [FULL],
    ),
    "sum_in_two_steps": (scan_of(lambda w, x, a, b: (b, a + x @ w), (ZEROS, ZEROS)), [FULL] * 2),
    "product_in_two_steps": (
        scan_of(lambda w, x, a, b, c: (b, a * (x @ w), jnp.tanh((a + c) @ w)), (ZEROS,) * 3),
        [FULL, FULL, LOW],
    ),
    "residual_stream": (scan_of(lambda w, x, c: c + jnp.tanh(c @ w)), [FULL]),
    "data": (scan_of(lambda w, x, c: jnp.tanh(c @ w), lambda w, x: x), [FULL]),
    "computed": (scan_of(lambda w, x, c: jnp.tanh(c @ w), lambda w, x: x @ w), [LOW]),
    "float32_body": (scan_of(lambda w, x, c: jnp.exp(c @ w)), [FULL]),
    "raises_the_other": (
        scan_of(lambda w, x, a, b: (jnp.tanh(a @ w) + b, b + a @ w), (ZEROS, ZEROS)),
        [FULL] * 2,
    ),
    "raises_one_after_the_other": (
        scan_of(
            lambda w, x, a, b, c: (jnp.tanh(a @ w) * b, jnp.tanh(b @ w) * c, jnp.exp(c @ w)),
            (ZEROS, ZEROS, ZEROS),
        ),
        [FULL] * 3,
    ),
    "beside": (
        scan_of(lambda w, x, a, b: (jnp.tanh(a @ w), b + a @ w), (ZEROS, ZEROS)),
        [LOW, FULL],
    ),
    "reset": (scan_of(lambda w, x, c: ZEROS), [LOW]),
    "parameter_alone": (scan_of(lambda w, x, c: w, lambda w, x: w), [FULL]),
    "parameter_from_zeros": (scan_of(lambda w, x, c: w * 0.3), [FULL]),
    "parameter_after_product": (scan_of(lambda w, x, c: w, lambda w, x: x @ w), [LOW]),
    "integer": (scan_of(lambda w, x, i, c: (i + 1, jnp.tanh(c @ w)), (0, ZEROS)), ["int32", LOW]),
}


@pytest.mark.parametrize(("fn", "expected"), CARRIES.values(), ids=CARRIES)
def test_dtype_of_the_carries(fn, expected):
    low = autocast(fn, jnp.bfloat16, params=0)
    (loop,) = [e for e in find(trace(low, W, X), "scan") if e.params["length"] == 3]
    _, count = scan_split(loop.params)
    assert [v.aval.dtype.name for v in loop.outvars[:count]] == expected
    # The results come back as the function declares them, and gradients exist.
    for ours, theirs in zip(
        jax.tree.leaves(jax.eval_shape(low, W, X)),
        jax.tree.leaves(jax.eval_shape(fn, W, X)),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("level", ["o1", "compute"])
def test_carries_that_swap_places_add_up(level):
    """A product consumes them, or nothing would be in 16 bits."""

    def fn(w, x):
        step = lambda c, _: ((c[1], jnp.sin(c[0]) * (x @ w)), c[0] @ w)
        return lax.scan(step, (ZEROS, ZEROS), length=3)

    low = autocast(fn, policy=Policy(jnp.bfloat16, level=level), params=0)
    (loop,) = find(trace(low, W, X), "scan")
    assert [v.aval.dtype for v in loop.outvars[:2]] == [FULL] * 2


@pytest.mark.parametrize("name", "tanh logistic sin cos erf erfc sqrt cbrt".split())
def test_only_what_damps_an_error_does_not_add_up(name):
    """Near 0 a tanh is the identity, and a root of a square is one everywhere."""
    fn = scan_of(lambda w, x, c: getattr(lax, name)(c) + c @ w)
    (loop,) = find(trace(autocast(fn, jnp.bfloat16, params=0), W, X), "scan")
    assert loop.outvars[0].aval.dtype == ("bfloat16" if name == "logistic" else "float32")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "step",
    [
        lambda c, y: c + y,
        lambda c, y: jnp.sqrt(c * c + y),
        lambda c, y: jnp.cbrt(c**3 + y),
        lambda c, y: jnp.tanh(c + 1e-4 * y),
        lambda c, y: jnp.sin(c) + 1e-4 * y,
        lambda c, y: jnp.where(y > 0, c + 1e-4 * y, c),
        lambda c, y: jax.nn.sigmoid(8 * y) * c + (1 - jax.nn.sigmoid(8 * y)) * y,
    ],
    ids=["sum", "sqrt", "cbrt", "tanh", "sine", "where", "gate"],
)
def test_what_2048_steps_add_up_is_that_of_float32(step, dtype):
    def fn(w, x):
        y = (x @ w)[0, 0]
        return lax.scan(lambda c, _: (step(c, y), None), jnp.zeros(()), length=2048)[0]

    expected = fn(W, X)
    assert expected > 0.01
    np.testing.assert_allclose(autocast(fn, dtype)(W, X), expected, rtol=1e-3)


STREAMS = {
    "layers": (lambda p, x, c: c + jnp.tanh(c @ p), LOW),
    "layers_under_jit": (jax.checkpoint(lambda p, x, c: c + jax.jit(jnp.matmul)(c, p)), LOW),
    "attention": (lambda p, x, c: c + jax.nn.softmax((c @ p) @ c.T) @ c, LOW),
    "sum": (lambda p, x, c: c + x @ p, FULL),
    "step_of_an_optimizer": (lambda p, x, c: c - 1e-3 * (x.T @ (x @ c)), FULL),
}


@pytest.mark.parametrize(("body", "expected"), STREAMS.values(), ids=STREAMS)
def test_a_scanned_residual_stream_at_level_compute(body, expected):
    def fn(w, x):
        return lax.scan(lambda c, p: (body(p, x, c), None), x, w)[0]

    low = autocast(fn, policy=Policy(jnp.bfloat16, level="compute"), params=0)
    (loop,) = find(trace(low, jnp.stack([W, W, W]), X), "scan")
    assert loop.outvars[0].aval.dtype == expected
    # At the default level the stream is float32, as it is unrolled.
    (loop,) = find(trace(autocast(fn, policy=BF16, params=0), jnp.stack([W, W, W]), X), "scan")
    assert loop.outvars[0].aval.dtype == FULL


# Beyond float16, not beyond bfloat16.
CONSTANT = np.where(np.eye(8) > 0, 1.0, 1e5).astype(np.float32)


def product_in_the_loop(w, x):
    h = x @ w
    return lax.scan(lambda c, _: (h * 1e5, None), h, length=3)


BEYOND = {
    "literal_from_the_body": scan_of(lambda w, x, c: jnp.full((8, 8), 1e5), lambda w, x: x @ w),
    "constant_from_the_body": scan_of(lambda w, x, c: jnp.asarray(CONSTANT), lambda w, x: x @ w),
    "product_from_the_body": product_in_the_loop,
    "literal_at_the_start": scan_of(
        lambda w, x, c, d: (jnp.tanh(x @ w + (c * 1e-6) @ w), c),
        lambda w, x: (jnp.full((8, 8), 1e5), x @ w),
    ),
    "constant_at_the_start": scan_of(
        lambda w, x, c, d: (jnp.tanh(x @ w + (c * 1e-6) @ w), c),
        lambda w, x: (jnp.asarray(CONSTANT), x @ w),
    ),
}


@pytest.mark.parametrize(("dtype", "expected"), [("float16", FULL), ("bfloat16", LOW)])
@pytest.mark.parametrize("fn", BEYOND.values(), ids=BEYOND)
def test_a_carry_has_the_range_of_what_it_holds(fn, dtype, expected):
    low = autocast(fn, dtype, params=0)
    (loop,) = find(trace(low, W, X), "scan")
    assert loop.outvars[0].aval.dtype == expected
    for found, right in zip(jax.tree.leaves(low(W, X)), jax.tree.leaves(fn(W, X)), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-2)


def test_an_input_may_start_a_low_carry_where_it_has_no_vote():
    fn, _ = CARRIES["data"]
    low = autocast(fn, policy=Policy(jnp.bfloat16, level="compute"), params=0)
    (loop,) = find(trace(low, W, X), "scan")
    assert loop.outvars[0].aval.dtype == jnp.bfloat16
