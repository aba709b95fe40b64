"""The losses of optax and the dataclasses of chex under `autocast`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, dot_dtypes, trace

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 8)).astype(np.float32)
LABELS = RNG.integers(0, 3, 6)

bf16 = functools.partial(autocast, compute_dtype=jnp.bfloat16)

LOSSES = {
    "softmax_cross_entropy": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, 3)),
    "integer_labels": optax.softmax_cross_entropy_with_integer_labels,
    "sigmoid": lambda z, y: optax.sigmoid_binary_cross_entropy(z, jax.nn.one_hot(y, 3)),
    "focal": lambda z, y: optax.sigmoid_focal_loss(z, jax.nn.one_hot(y, 3)),
    "huber": lambda z, y: optax.huber_loss(z, jax.nn.one_hot(y, 3)),
    "l2": lambda z, y: optax.l2_loss(z, jax.nn.one_hot(y, 3)),
    "log_cosh": lambda z, y: optax.log_cosh(z, jax.nn.one_hot(y, 3)),
    "cosine": lambda z, y: optax.cosine_distance(z, jax.nn.one_hot(y, 3)),
    "kl": lambda z, y: optax.kl_divergence(jax.nn.log_softmax(z), jax.nn.one_hot(y, 3)),
    "ctc": lambda z, y: optax.ctc_loss(
        z[None], jnp.zeros((1, 6)), jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 2))
    ),
}


def optax_loss(name):
    return lambda params, x, y: jnp.mean(LOSSES[name](x @ params["w"], y))


def loss_of_low_logits(name):
    """What a careful hand writes: a low matmul, and a float32 loss of its logits."""

    def loss(params, x, y):
        logits = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        return jnp.mean(LOSSES[name](logits.astype(jnp.float32), y))

    return loss


LOSS_ARGS = {"w": RNG.normal(size=(8, 3)).astype(np.float32)}, ROWS, LABELS


@pytest.mark.parametrize("name", LOSSES)
def test_optax_losses_are_as_good_as_by_hand(name):
    # Not under jit, where XLA may keep the low logits in float32.
    with jax.check_tracer_leaks(False):
        loss, grads = jax.value_and_grad(bf16(optax_loss(name)))(*LOSS_ARGS)
        want, want_grads = jax.value_and_grad(loss_of_low_logits(name))(*LOSS_ARGS)
    # CTC picks labels by a matmul with their one-hot codes, which is low as any other.
    np.testing.assert_allclose(loss, want, rtol=5e-3 if name == "ctc" else 1e-5)
    scale = np.linalg.norm(want_grads["w"])
    assert np.linalg.norm(grads["w"] - want_grads["w"]) <= 1e-2 * scale
    assert grads["w"].dtype == "float32"
    # The last of CTC's three is a batch of inner products, which promotes.
    dots = dot_dtypes(trace(bf16(optax_loss(name)), *LOSS_ARGS))
    assert set(dots[:2] if name == "ctc" else dots) == {("bfloat16",) * 3}


def test_chex_dataclasses():
    @chex.dataclass
    class Params:
        w: jax.Array
        b: jax.Array

    def fn(params, x):
        return jnp.tanh(x @ params.w + params.b)

    params = Params(w=jnp.ones((8, 3)) / 8, b=jnp.zeros(3))
    assert_dots_run_in("bfloat16", trace(bf16(fn), params, ROWS))
    assert isinstance(jax.eval_shape(bf16(lambda p: p), params), Params)
