"""`precision_metrics`: scalars by name for any writer of metrics."""

import jax
import numpy as np
import optax

from jmp_autocast import dynamic_loss_scaling
from jmp_autocast.integrations.metrics import precision_metrics

PARAMS = {"w": np.ones((8, 3), np.float32)}
BAD = {"w": np.full((8, 3), np.inf, np.float32)}
EXPECTED = {"loss_scale": 512.0, "skipped_steps": 1, "step_skipped": 1, "consecutive_skips": 1}


def test_the_loss_scale_and_the_skips():
    tx = dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9), init_scale=2.0**10)
    state = tx.init(PARAMS)
    for grads in (PARAMS, BAD):
        _, state = jax.jit(tx.update)(grads, state, PARAMS)
    metrics = jax.jit(lambda state: precision_metrics({"opt_state": state}, prefix=""))(state)
    assert metrics == EXPECTED
    assert precision_metrics(state)["precision/loss_scale"] == 512.0
    dtypes = {key: value.dtype.name for key, value in metrics.items()}
    assert dtypes == dict.fromkeys(EXPECTED, "int32") | {"loss_scale": "float32"}
    assert all(value.shape == () for value in metrics.values())
