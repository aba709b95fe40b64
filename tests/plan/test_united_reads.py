"""Cotangents that nearly cancel are added in float32, also behind what moves elements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import BF16, FP16, autocast, explain
from tests.support.jaxprs import find

RNG = np.random.default_rng(0)
N = 64
# The product is exact: what is rounded is its cotangent.
X = jnp.asarray(RNG.normal(size=(N, N)), jnp.bfloat16).astype(jnp.float32)
W = jnp.eye(N)
NEAR = X + 0.05 * jnp.asarray(RNG.normal(size=(N, N)), jnp.float32)
Y = jax.nn.sigmoid(NEAR)
HALVES = jax.nn.softmax(NEAR.reshape(N, 2, N // 2), 2).reshape(N, N)
ROWS, COLUMNS = jax.nn.softmax(NEAR, 1), jax.nn.softmax(NEAR, 0)


def tail(z):
    return jnp.log1p(jnp.exp(-jnp.abs(z)))


# Cross entropies of logits and labels that nearly agree: the gradient is what is left of them.
LOSSES = {
    "optax": lambda z: optax.sigmoid_binary_cross_entropy(z, Y),
    "maximum": lambda z: jnp.maximum(z, 0) - z * Y + tail(z),
    "relu": lambda z: jax.nn.relu(z) - z * Y + tail(z),
    "clip": lambda z: jnp.clip(z, 0) - z * Y + tail(z),
    "where": lambda z: jnp.where(z > 0, z, 0) - z * Y + tail(z),
    "under_jit": jax.jit(lambda z: jnp.maximum(z, 0) - z * Y + tail(z)),
    "parts_under_jit": lambda z: jax.jit(lambda z: jnp.maximum(z, 0))(z) - z * Y + tail(z),
    "softplus": lambda z: jax.nn.softplus(z) - z * Y,
    "logaddexp": lambda z: jnp.logaddexp(z, 0) - z * Y,
    "transposed": lambda z: jax.nn.logsumexp(z.T, 0) - jnp.sum(z * ROWS, 1),
    "reshaped": lambda z: jax.nn.logsumexp(z.reshape(N, 1, N), 2)[:, 0] - jnp.sum(z * ROWS, 1),
    "sliced": lambda z: (
        jax.nn.logsumexp(z[:, : N // 2], 1)
        + jax.nn.logsumexp(z[:, N // 2 :], 1)
        - jnp.sum(z * HALVES, 1)
    ),
    "both_ways": lambda z: (
        jax.nn.logsumexp(z, 1) + jax.nn.logsumexp(z.T, 1) - jnp.sum(z * (ROWS + COLUMNS), 1)
    ),
}


def error(loss, policy):
    total = lambda w: jnp.sum(loss(X @ w))
    exact = jax.grad(total)(W)
    found = jax.jit(jax.grad(autocast(total, policy=policy)))(W)
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


@pytest.mark.parametrize("level", ["o1", "compute", "tensor_cores"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_loss_that_is_nearly_right(name, level):
    # Their sum is rounded once: 0.17 %. Each by itself: 4 to 16 %.
    assert error(LOSSES[name], BF16.with_level(level)) < 3e-3


@pytest.mark.parametrize("name", ["optax", "maximum", "both_ways"])
def test_gradients_of_a_loss_that_is_nearly_right_in_float16(name):
    assert error(LOSSES[name], FP16) < 5e-4


def test_a_confident_answer_has_a_gradient():
    # sigmoid(8) is 1 - 3.4e-4, and 1 in bfloat16: the gradient was zero.
    def loss(w):
        z = jnp.full((1, 1), 8.0) @ w
        return jnp.sum(jax.nn.softplus(z) - z)

    w = jnp.ones((1, 1))
    found = jax.jit(jax.grad(autocast(loss, policy=BF16)))(w)
    np.testing.assert_allclose(found, jax.grad(loss)(w), rtol=2**-7)


def test_all_readers_share_one_cast():
    jaxpr = jax.make_jaxpr(autocast(lambda w: jnp.sum(LOSSES["maximum"](X @ w)), policy=BF16))(W)
    casts = [e for e in find(jaxpr, "convert_element_type") if e.outvars[0].aval.shape == (N, N)]
    assert [e.outvars[0].aval.dtype.name for e in casts] == ["bfloat16", "float32"]
    assert {e.outvars[0].aval.dtype.name for e in find(jaxpr, "max")} == {"float32"}


def test_what_has_one_reader_stays_in_16_bits():
    """The activation before a norm, and masked scores, are stored in 16 bits."""

    def normed(w, mask):
        h = jax.nn.relu(X @ w)
        scores = jnp.where(mask, X @ w, -jnp.inf)
        return jnp.sum(jax.nn.standardize(h)) + jnp.sum(jax.nn.softmax(scores) ** 2)

    jaxpr = jax.make_jaxpr(autocast(normed, policy=BF16))(W, X > -1)
    assert {e.outvars[0].aval.dtype.name for e in find(jaxpr, "select_n")} == {"bfloat16"}
    relu = [e for e in find(jaxpr, "max") if e.invars[0].aval.shape == (N, N)]
    assert {e.outvars[0].aval.dtype.name for e in relu} == {"bfloat16"}


def test_what_a_product_reads_stays_in_16_bits():
    def loss(w):
        z = X @ w
        return jnp.sum(jax.nn.standardize(z)) + jnp.sum(z.T @ w) + jnp.sum(jax.nn.relu(z) @ w)

    jaxpr = jax.make_jaxpr(autocast(loss, policy=BF16))(W)
    moved = [*find(jaxpr, "transpose"), *find(jaxpr, "max")]
    moved = [e for e in moved if e.invars[0].aval.shape == (N, N)]
    assert {e.outvars[0].aval.dtype.name for e in moved} == {"bfloat16"}


def test_the_reader_is_named():
    rows = explain(lambda w: jnp.sum(LOSSES["maximum"](X @ w)), W, policy=BF16).rows
    found = next(row for row in rows if row.primitive == "max")
    assert (found.results, found.reason, found.cause) == (("float32",), "FEEDER", "read by sub")
