"""What is read in float32 by several readers is cast once for all, also before a call.

Their cotangents nearly cancel, and are added in float32, also behind what moves elements.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import BF16, FP16, Policy, autocast, explain, full_precision
from jmp_autocast.call import kernels
from tests.support.jaxprs import find
from tests.support.numerics import relative_error

RNG = np.random.default_rng(0)
N = 64
# The product is exact: what is rounded is its cotangent.
X = jnp.asarray(RNG.normal(size=(N, N)), jnp.bfloat16).astype(jnp.float32)
ROWS = jnp.asarray(RNG.normal(size=(4 * N, N)), jnp.bfloat16).astype(jnp.float32)
W = jnp.eye(N)
NEAR = X + 0.05 * jnp.asarray(RNG.normal(size=(N, N)), jnp.float32)
Y = jax.nn.sigmoid(NEAR)
HALVES = jax.nn.softmax(NEAR.reshape(N, 2, N // 2), 2).reshape(N, N)
OF_ROWS, OF_COLUMNS = jax.nn.softmax(NEAR, 1), jax.nn.softmax(NEAR, 0)


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
    "transposed": lambda z: jax.nn.logsumexp(z.T, 0) - jnp.sum(z * OF_ROWS, 1),
    "reshaped": lambda z: jax.nn.logsumexp(z.reshape(N, 1, N), 2)[:, 0] - jnp.sum(z * OF_ROWS, 1),
    "sliced": lambda z: (
        jax.nn.logsumexp(z[:, : N // 2], 1)
        + jax.nn.logsumexp(z[:, N // 2 :], 1)
        - jnp.sum(z * HALVES, 1)
    ),
    "both_ways": lambda z: (
        jax.nn.logsumexp(z, 1) + jax.nn.logsumexp(z.T, 1) - jnp.sum(z * (OF_ROWS + OF_COLUMNS), 1)
    ),
}


def total(name):
    return lambda w: jnp.sum(LOSSES[name](X @ w))


@functools.cache
def exact_gradient(name):
    return jax.jit(jax.grad(total(name)))(W)


def error(name, policy):
    found = jax.jit(jax.grad(autocast(total(name), policy=policy)))(W)
    return relative_error(found, exact_gradient(name))


@pytest.mark.parametrize("level", ["o1", "compute", "tensor_cores"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_loss_that_is_nearly_right(name, level):
    # Their sum is rounded once: 0.17 %. Each by itself: 4 to 16 %.
    assert error(name, Policy(jnp.bfloat16, level=level)) < 3e-3


@pytest.mark.parametrize("name", ["optax", "maximum", "both_ways"])
def test_gradients_of_a_loss_that_is_nearly_right_in_float16(name):
    assert error(name, FP16) < 5e-4


def test_a_confident_answer_has_a_gradient():
    # sigmoid(8) is 1 - 3.4e-4, and 1 in bfloat16: the gradient was zero.
    def loss(w):
        z = jnp.ones((1, 8)) @ w
        return jnp.sum(jax.nn.softplus(z) - z)

    w = jnp.ones((8, 1))
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


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda z: (z, z.T), "bfloat16"),  # a returned value is no reader that shares a cast
        (lambda z: ((t := jnp.exp(z).T) @ W, jax.lax.complex(t, t)), "float32"),
        (lambda z: ((t := jnp.exp(z).T) @ W, jnp.argmax(t, 1)), "float32"),
    ],
    ids=["returned", "kept", "ranked"],
)
def test_who_reads_a_transpose_in_float32(fn, dtype):
    (move,) = find(jax.make_jaxpr(autocast(lambda w: fn(X @ w), policy=BF16))(W), "transpose")
    assert move.outvars[0].aval.dtype == dtype


def test_the_reader_is_named():
    rows = explain(lambda w: jnp.sum(LOSSES["maximum"](X @ w)), W, policy=BF16).rows
    found = next(row for row in rows if row.primitive == "max")
    assert (found.results, found.reason, found.cause) == (
        ("float32",),
        "FEEDER",
        "read by several consumers",
    )


# --- in calls ----------------------------------------------------------------------------------


def normalized(x, w, t, variance=jnp.var):
    h = x @ w
    scale = jax.lax.rsqrt(variance(h, 0) + 1e-3)
    return jnp.sum(t * (h - jnp.mean(h, 0)) * scale)


# The cotangent of a norm, and of `z / norm(z)`, is orthogonal to what it reads: those of its
# readers nearly cancel. Their sum is rounded once: 0.17 % in bfloat16. Each by itself: 2.4 %.
def cosine(x, w, t):
    """As with pairs of images and texts."""
    z = x @ w
    return jnp.sum(t * z / jnp.linalg.norm(z, axis=-1, keepdims=True))


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["o1", "compute", "tensor_cores"])
@pytest.mark.parametrize("loss", [normalized, cosine])
def test_cotangents_of_a_norm_are_added_in_float32(loss, level, policy):
    t = ROWS + 0.1 * jnp.asarray(RNG.normal(size=ROWS.shape), jnp.bfloat16).astype(jnp.float32)
    exact = jax.grad(loss, 1)(ROWS, W, t)
    found = jax.jit(jax.grad(autocast(loss, policy=dataclasses.replace(policy, level=level)), 1))(
        ROWS, W, t
    )
    assert relative_error(found, exact) < 0.38 * float(jnp.finfo(policy.compute_dtype).eps)


def variances(jaxpr):
    return [eqn for eqn in find(jaxpr, "jit") if eqn.params["name"] == "_var"]


def test_the_call_stays_as_it_is(monkeypatch):
    # A process that has decorated a kernel has caches of its own inside autocast.
    monkeypatch.setattr(kernels, "_decorated", set())
    t = jnp.ones((N, N))
    plain = variances(jax.make_jaxpr(normalized)(X, W, t))
    ours = jax.make_jaxpr(autocast(normalized, policy=BF16))(X, W, t)
    assert [eqn.params["jaxpr"] is plain[0].params["jaxpr"] for eqn in variances(ours)] == [True]
    # One cast of the product, for the mean, the variance and the difference.
    casts = [e for e in find(ours, "convert_element_type") if e.invars[0].aval.shape == (N, N)]
    widened = [e for e in casts if e.outvars[0].aval.dtype == jnp.float32]
    assert len(widened) == 1


def test_what_is_computed_again_is_kept_in_16_bits():
    again = functools.partial(normalized, variance=jax.checkpoint(jnp.var, static_argnums=1))
    ours = jax.make_jaxpr(autocast(again, policy=BF16))(X, W, jnp.ones((N, N)))
    (eqn,) = [*find(ours, "remat2"), *find(ours, "checkpoint")]
    assert eqn.invars[0].aval.dtype == jnp.bfloat16


def test_what_goes_to_another_device_goes_there_in_16_bits():
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    moved = jax.jit(lambda x: jnp.var(x, 0), in_shardings=there)
    again = functools.partial(normalized, variance=lambda x, _: moved(x))
    ours = jax.make_jaxpr(autocast(again, policy=BF16))(X, W, jnp.ones((N, N)))
    (eqn,) = [e for e in find(ours, "jit") if e.params["name"] == "<lambda>"]
    assert eqn.invars[0].aval.dtype == jnp.bfloat16


def test_a_guard_is_said_where_it_is():
    """A number that float16 cannot hold keeps the select in float32, and not its operand."""

    def masked(x, w, mask):
        return jnp.where(mask, x @ w, -1e9)

    planned = autocast(masked, policy=FP16).planned(X, W, X > 0)
    inner = next(plan.inner[0] for plan in planned.plan.equations if plan.inner)
    assert "LITERAL" in [plan.reason.code.value for plan in inner.equations]


def attention(p, x, mask):
    q, k, v = (x @ p[name] for name in "qkv")
    scores = jnp.where(mask, q @ k.T / 8, jnp.finfo(x.dtype).min)
    return jnp.sum(jnp.square(jax.nn.softmax(scores) @ v))


def test_a_move_for_who_does_not_mind_is_not_minded():
    """The gradient of a maximum compares: that is no reason to round the scores before."""
    p, x = {name: np.ones((8, 8), np.float32) for name in "qkv"}, np.ones((8, 8), np.float32)
    mask = np.tri(8, dtype=bool)
    for fn in (attention, jax.grad(attention)):
        rows = explain(fn, p, x, mask, policy=BF16).rows
        scores = next(r for r in rows if r.primitive == "div")
        assert (scores.results, scores.reason) == (("float32",), "NO_PRODUCT")
    rows = explain(jax.grad(lambda w: jnp.sum(jax.nn.softmax(X @ w) @ w)), W, policy=BF16).rows
    largest = next(r for r in rows if r.primitive == "reduce_max")
    assert (largest.results, largest.reason) == (("float32",), "NO_PRODUCT")


@pytest.mark.parametrize("least", [float, jnp.sqrt], ids=["literal", "computed"])
def test_a_threshold_made_of_literals_is_no_rank(least):
    def divided(p, x):
        h = jax.nn.relu(x @ p["w"] + p["b"])
        largest = jnp.max(h, 1, keepdims=True)
        return h / jnp.where(largest < least(1e-38), 1.0, largest) @ p["w"]

    p, x = {"w": np.ones((8, 8), np.float32), "b": np.ones(8, np.float32)}, np.ones((8, 8))
    rows = explain(divided, p, np.float32(x), policy=BF16).rows
    found = {r.results for r in rows if r.primitive in ("add", "max", "reduce_max")}
    assert found == {("bfloat16",)}


def test_an_inner_product_narrows_nothing():
    """It promotes, so a moved float32 value keeps its digits for it."""
    moved = lambda h: jnp.vdot(jnp.exp(h).T, h) * (h @ W)
    (eqn,) = find(jax.make_jaxpr(autocast(lambda w: moved(X @ w), policy=BF16))(W), "transpose")
    assert eqn.outvars[0].aval.dtype == jnp.float32


def test_a_product_in_a_float32_scope_narrows_nothing():
    def fn(w):
        moved = jnp.exp(X @ w).T
        with full_precision():
            return moved @ w

    (eqn,) = find(jax.make_jaxpr(autocast(fn, policy=BF16))(W), "transpose")
    assert eqn.outvars[0].aval.dtype == jnp.float32
