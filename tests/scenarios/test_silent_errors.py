"""Programs whose 16-bit version was silently wrong: values and gradients near those of float32.

Each class stands in several forms: other operands, orders and places of the same danger.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast

DTYPES = ["bfloat16", "float16"]
# The unit roundoff; what a careful program in 16 bits loses is a small multiple of it.
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ONE = jnp.eye(8)
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(8, 8)) / 4, jnp.float32)
X = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)


def mapped(fn):
    return lambda w, *xs: jax.vmap(fn, (None, *(0 for _ in xs)))(w, *(x[None] for x in xs))[0]


AROUND = [
    *((lambda fn: fn, dtype) for dtype in DTYPES),
    (mapped, "bfloat16"),
    (jax.checkpoint, "bfloat16"),
]


def window_mean(w, x):
    of = ("NHWC", "HWIO", "NHWC")
    layer = lambda x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=of)
    sums = lax.reduce_window(layer(x), 0.0, lax.add, (1, 64, 64, 1), (1, 1, 1, 1), "VALID")
    return layer(sums / 64**2)


def fast_weights(w, x, y):
    first = w
    for _ in range(8):
        w = w - 1e-4 * (x.T @ jnp.tanh(x @ w - y))
    # A matmul reads the new weights, and a difference, which float32 readers make exact.
    return jnp.sum((x @ w) ** 2) * 0.0 + (w - first) * 1e3


def mask_read_twice(w, x, mask):
    scores = (x @ w) @ x.T + mask
    return jnp.tanh(scores / 8) + jax.nn.softmax(scores)


def gate(w, x):
    a = jax.nn.sigmoid(x @ w)
    start = jnp.zeros_like(a)
    return lax.scan(lambda h, _: (a * h + (1 - a) * x, None), start, length=4096)[0]


MASK = jnp.where(jnp.arange(16) < 12, 0.0, jnp.finfo(jnp.float32).min)

# name: function of a weight and arrays, its arguments, tolerance in unit roundoffs
VALUES = {
    "average_pool": (window_mean, (ONE[None, None], jnp.full((1, 64, 64, 8), 20.0)), 2),
    "fast_weights": (fast_weights, (W, X, X), 8),
    "column_of_targets": (
        lambda w, x, y: jnp.tanh((x @ w - y) / 1e5) * 1e5,
        (W, X, jnp.full((16, 1), 1e5)),
        2,
    ),
    "mask_read_twice": (mask_read_twice, (W, X, MASK), 8),
    "log_of_a_tail": (
        lambda w, x: jax.scipy.stats.norm.logcdf(x @ w),
        (ONE, jnp.full((1, 8), -6.0)),
        8,
    ),
    "reciprocal_of_a_tail": (
        lambda w, x: (1 + lax.erf(x @ w)) ** -1,
        (ONE, jnp.full((1, 8), -2.5)),
        16,
    ),
    "reciprocal_of_a_complement": (
        lambda w, x: (1 - jax.nn.sigmoid(x @ w)) ** -1,
        (ONE, jnp.full((1, 8), 8.0)),
        16,
    ),
    "inverse_function": (
        lambda w, x: jnp.arctanh(jnp.clip(jnp.tanh(x @ w), -0.99999, 0.99999)),
        (ONE, jnp.full((1, 8), 3.0)),
        8,
    ),
    "gate_next_to_one": (gate, (ONE, jnp.full((1, 8), 8.0)), 8),
}


@pytest.mark.parametrize(("around", "dtype"), AROUND, ids=[*DTYPES, "mapped", "checkpointed"])
@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients_are_near_those_of_float32(name, around, dtype):
    fn, (w, *xs), units = VALUES[name]
    fn = around(fn)

    def value_and_gradient(fn):
        out, vjp = jax.vjp(lambda w: fn(w, *xs), w)
        return out, *vjp(jnp.ones_like(out))

    low = autocast(fn, dtype, params=0)
    found = jax.jit(lambda: (value_and_gradient(low), value_and_gradient(fn)))()
    for ours, theirs in zip(*found, strict=True):
        scale = np.abs(theirs).max()
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=units * EPS[dtype] * scale)


GRID = np.arange(1000, dtype=np.float32)
OFFSET = jnp.full((1000, 8), 0.7)
INDICES = {
    "argument": lambda w, x, g: g + (x @ w)[:, 0],
    "counted": lambda w, x, g: jnp.arange(1000.0) + (x @ w)[:, 0],
    "integers": lambda w, x, g: g.astype(jnp.int32).astype(jnp.float32) + (x @ w)[:, 0],
    "constant": lambda w, x, g: GRID + (x @ w)[:, 0],
    "under_jit": lambda w, x, g: jax.jit(jnp.add)((x @ w)[:, 0], g),
}
ROUNDINGS = {
    "floor": lambda v: jnp.floor(v),
    "round": lambda v: jnp.round(v - 0.4),
    "cast": lambda v: v.astype(jnp.int32),
    "clipped": lambda v: jnp.clip(v, 0, 999).astype(jnp.int32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        *((name, "floor") for name in INDICES),
        *(("argument", how) for how in ("round", "cast", "clipped")),
    ],
)
def test_an_index_is_that_of_float32(name, rounding, dtype):
    """Also where a matmul reads the same position."""

    def fn(w, x, grid):
        position = INDICES[name](w, x, grid)
        return ROUNDINGS[rounding](position), jnp.repeat(position[:, None], 8, 1) @ w

    low = jax.jit(autocast(fn, dtype, params=0))
    args = ONE, OFFSET, jnp.asarray(GRID)
    np.testing.assert_array_equal(low(*args)[0], jax.jit(fn)(*args)[0])


EQUAL = jnp.ones((4, 8))
PEAK = jnp.where(jnp.arange(1023) == 511, 2.0, 1.0)[:, None] * jnp.ones(8)
# What reads a row thousands of times, and the rows.
READ_OFTEN = {
    "index": (lambda h: h[jnp.zeros(8192, jnp.int32)], EQUAL),
    "take": (lambda h: jnp.take(h, jnp.zeros(8192, jnp.int32), axis=0), EQUAL),
    "resize": (lambda h: jax.image.resize(h[:1], (8192, h.shape[1]), "nearest"), EQUAL),
    "broadcast": (lambda h: jnp.broadcast_to(h[:1], (8192, h.shape[1])), EQUAL),
    "maximum of large windows": (
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (512, 1), (1, 1), "VALID"),
        PEAK,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("read", "x"), READ_OFTEN.values(), ids=READ_OFTEN)
def test_the_gradient_of_a_row_that_is_read_often(read, x, dtype):
    loss = lambda w, x: jnp.sum(read(x @ w) @ jnp.full((8, 1), 0.01))
    got = jax.grad(autocast(loss, dtype))(ONE, x)
    np.testing.assert_allclose(got, jax.grad(loss)(ONE, x), rtol=2 * EPS[dtype])


OUTSIDE = {
    "computed": lambda p: jnp.exp(jnp.log(jnp.arange(1.0, 17.0) * 100))[:, None],
    "counted": lambda p: (jnp.arange(16.0) * 100 + 0.5)[:, None],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_float32_before_a_loop_is_no_bias_in_it(name, dtype):
    def fn(w, x):
        p = x @ w
        t = OUTSIDE[name](p)
        return lax.scan(lambda c, p: (c, jnp.cos(t + p)), 0, p[None])[1][0]

    low = jax.jit(autocast(fn, dtype, params=0))(W, X)
    np.testing.assert_allclose(low, jax.jit(fn)(W, X), atol=4 * EPS[dtype])


MADE = {
    "normalized": lambda w, v: v * w / jnp.linalg.norm(w, axis=0, keepdims=True),
    "merged": lambda w, v: w + v[:, :6] @ v[:6],
    "updated": lambda w, v: w - 0.1 * (v.T @ jnp.tanh(v @ w)),
    "read_by_calls": lambda w, v: w + v[:, :6] @ v[:6],
}
PRODUCTS = {"read_by_calls": jax.jit(jnp.matmul)}


@pytest.mark.parametrize("name", MADE)
def test_the_gradient_of_a_computed_weight_that_is_read_300_times(name):
    """Added up in bfloat16 the cotangents lost 30 to 40 % of it; float16 lost a tenth of that."""
    w, v = jnp.eye(8) + 0.3, jnp.full((8, 8), 0.1) + 0.01 * jnp.arange(8.0)

    def loss(params, x):
        made, product = MADE[name](*params), PRODUCTS.get(name, jnp.matmul)
        return sum(jnp.sum(product(x, made)) for _ in range(300)) / 300

    x = jnp.ones((2, 8)) + 0.1 * jnp.arange(8.0)
    low = autocast(loss, "bfloat16")
    got = jax.jit(jax.grad(low))((w, v), x)
    for ours, theirs in zip(got, jax.jit(jax.grad(loss))((w, v), x), strict=True):
        atol = 4 * EPS["bfloat16"] * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
