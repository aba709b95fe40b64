"""The wrapper under JAX's transformations; `test_faults` compiles it ahead of time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    dynamic_loss_scaling,
    skipped_steps,
)
from jmp_autocast.loss_scaling import loss_scale, step_skipped
from tests.support.loss_scale_runs import (
    WAYS,
    batches,
    last,
    model_params,
    scaled_run,
    scaled_step,
    skipping_by,
)

TX = dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9), growth_interval=2)  # strict promotion holds


@pytest.fixture(autouse=True, params=WAYS)
def way(request):
    """Both ways to skip a step, on this CPU."""
    with skipping_by(request.param):
        yield request.param


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def test_vmap_over_a_batch_of_states_skips_each_on_its_own():
    data = np.stack([batches(3, bad=[1], seed=1), batches(3, seed=2), batches(3, [0, 2], seed=3)])
    models = [model_params(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    step = jax.vmap(scaled_step(TX))

    @jax.jit
    def run(params, data):
        body = lambda carry, x: (step(*carry, x), None)
        return jax.lax.scan(body, (params, jax.vmap(TX.init)(params)), data)[0]

    params, state = jax.device_get(run(stacked, data.swapaxes(0, 1)))
    assert skipped_steps(state).tolist() == [1, 0, 2]
    assert step_skipped(state).tolist() == [False, False, True]
    for n, model in enumerate(models):
        expected, single = last(scaled_run(TX, model, data[n]))
        for many, one in zip(state.loss_scale, single.loss_scale, strict=True):
            assert many[n] == one
        for many, one in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(many[n], one, rtol=1e-5, atol=1e-6)


def test_a_step_makes_no_host_transfer():
    step = jax.jit(scaled_step(TX))
    params, data = on_device(model_params()), on_device(list(batches(2, bad=[1])))
    state = TX.init(params)
    params, state = step(params, state, data[0])
    with jax.transfer_guard("disallow"):
        params, state = step(params, state, data[1])
        scale = loss_scale(state)
    assert bool(step_skipped(state))
    assert float(scale) == 2.0**15
