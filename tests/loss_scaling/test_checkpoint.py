"""A run that goes on from a checkpoint is the run that was never stopped, bit for bit."""

import itertools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
    static_loss_scaling,
)
from jmp_autocast.loss_scaling import loss_scale
from tests.support.loss_scale_runs import bits

STEPS = 12
BAD_STEPS = (2, 3, 8)  # the scale backs off, and before and after them it grows


def dynamic(inner):
    return dynamic_loss_scaling(inner, init_scale=2.0**10, growth_interval=2)


OPTIMIZERS = {
    "alone": lambda: dynamic(optax.adam(1e-2)),
    "around a chain": lambda: dynamic(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0, 0.1, 9)))
    ),
    "around MultiSteps": lambda: dynamic(
        optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation()
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(
        lambda learning_rate: dynamic(optax.adam(learning_rate))
    )(learning_rate=optax.linear_schedule(0.0, 0.1, 9)),
    "static": lambda: static_loss_scaling(optax.adam(1e-2), 1024.0),
}


pytestmark = pytest.mark.usefixtures("as_users_run_it")


class Run:
    """Steps of a float16 regression, some of which overflow."""

    def __init__(self, tx):
        self.traces = 0

        def loss(params, x):
            return jnp.mean(jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - 0.3))

        def step(state, x):
            self.traces += 1
            params, opt_state = state
            fast = autocast(loss, jnp.float16)
            _, grads = scaled_value_and_grad(fast)(opt_state, params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self.step = jax.jit(step)
        key = jax.random.key(0)
        params = {"w": jax.random.normal(key, (8, 4)), "b": jnp.array([0.1, -0.0, 0.0, 1.0])}
        self.start = (params, tx.init(params))

    def states(self, state, first):
        for i in range(first, STEPS):
            state = self.step(state, batch(i))
            yield state


def batch(i):
    return np.float32(np.inf if i in BAD_STEPS else 1) * jax.random.normal(
        jax.random.key(i), (16, 8)
    )


def through_orbax(state, like, path):
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(like))


def through_flax(state, like, path):
    path.write_bytes(flax.serialization.to_bytes(state))
    return flax.serialization.from_bytes(like, path.read_bytes())


THROUGH = [through_orbax, through_flax]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    run = Run(OPTIMIZERS[name]())
    states = list(run.states(run.start, 0))
    if name != "static":
        scales = {float(loss_scale(opt_state)) for _, opt_state in states}
        assert len(scales) > 2
        assert min(scales) < 1024 < max(scales)
    assert skipped_steps(states[-1][1]) > 0
    # After 3 steps the last one was skipped; after 5 a window of MultiSteps is open.
    for through, done in itertools.product(THROUGH, (3, 5)):
        saved = states[done - 1]
        restored = through(saved, run.start, tmp_path / f"{through.__name__}-{done}")
        assert bits(restored) == bits(saved)
        assert loss_scale(restored[1]) == loss_scale(saved[1])
        for resumed, expected in zip(run.states(restored, done), states[done:], strict=True):
            assert bits(resumed) == bits(expected)
    assert run.traces == 1
