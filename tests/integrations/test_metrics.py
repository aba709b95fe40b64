"""`precision_metrics`: scalars by name for any writer of metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_autocast import (
    FP16,
    autocast,
    dynamic_loss_scaling,
    scaled_value_and_grad,
)
from jmp_autocast.integrations.metrics import precision_metrics

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
PARAMS = {"w": np.ones((8, 3), np.float32)}
BAD = {"w": np.full((8, 3), np.inf, np.float32)}


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


EXPECTED = {"loss_scale": 512.0, "skipped_steps": 1, "step_skipped": 1, "consecutive_skips": 1}


def test_the_loss_scale_and_the_skips():
    tx = dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9), init_scale=2.0**10)
    state = tx.init(PARAMS)
    for grads in (PARAMS, BAD):
        _, state = jax.jit(tx.update)(grads, state, PARAMS)
    metrics = precision_metrics({"opt_state": state}, prefix="")
    assert metrics == EXPECTED
    dtypes = {key: value.dtype.name for key, value in metrics.items()}
    assert dtypes == dict.fromkeys(EXPECTED, "int32") | {"loss_scale": "float32"}
    assert all(value.shape == () for value in metrics.values())


def test_inside_a_jitted_step():
    tx = dynamic_loss_scaling(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, x):
        value, grads = scaled_value_and_grad(autocast(loss, policy=FP16))(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, **precision_metrics(opt_state)}
        return optax.apply_updates(params, updates), opt_state, metrics

    params = jax.device_put(PARAMS)
    *_, metrics = step(params, tx.init(params), X)
    assert metrics["precision/loss_scale"] == 2.0**16
    assert metrics["precision/step_skipped"] == 0
