"""Training that goes wrong in silence: scales misplaced, and integer parameters."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    scaled_value_and_grad,
    static_loss_scaling,
)
from jmp_autocast.loss_scaling import loss_scale

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = np.full((4, 2), 0.5, np.float32)
CLIP = optax.clip_by_global_norm(0.1)


pytestmark = pytest.mark.usefixtures("as_users_run_it")


@autocast(policy=jnp.float16)
def loss(params, x):
    return jnp.mean((x @ params - 1.0) ** 2)


def training_step(tx):
    @jax.jit
    def step(params, opt_state, x):
        value, grads = scaled_value_and_grad(loss)(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


ORDERS = {
    "MultiSteps": (
        optax.MultiSteps(dynamic_loss_scaling(optax.sgd(0.1)), 2),
        "MultiSteps is around",
    ),
    "apply_if_finite": (
        optax.apply_if_finite(dynamic_loss_scaling(optax.sgd(0.1)), 2),
        r"apply_if_finite is around.*leave it out",
    ),
    "a clip before": (
        optax.chain(CLIP, dynamic_loss_scaling(optax.sgd(0.1))),
        r"is before the loss scaling.*dynamic_loss_scaling\(optax.chain\(clip, optimizer\)\)",
    ),
    "masked": (
        optax.masked(optax.chain(CLIP, static_loss_scaling(optax.sgd(0.1), 8.0)), True),
        "is before the loss scaling",
    ),
    "a clip after": (optax.chain(dynamic_loss_scaling(optax.sgd(0.1)), CLIP), None),
    "a clip inside": (dynamic_loss_scaling(optax.chain(CLIP, optax.sgd(0.1))), None),
}


@pytest.mark.parametrize(("tx", "message"), ORDERS.values(), ids=ORDERS)
def test_a_wrong_order_is_seen_in_the_state(tx, message):
    with warnings.catch_warnings(record=True, action="always") as caught:
        jax.eval_shape(training_step(tx), W, tx.init(W), X)
        loss_scale(((W, W), tx.init(W)))  # a pair of parameters and a state is no chain
    texts = [str(warning.message) for warning in caught]
    assert all(warning.filename == __file__ for warning in caught)
    assert len(texts) == (2 if message else 0)
    assert not message or all(re.search(message, text) for text in texts)
