"""float16 weights take the steps of float32 ones: float16 holds no state of an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jmp_autocast import dynamic_loss_scaling, static_loss_scaling
from jmp_autocast.optimizers import kahan_summation, master_weights, stochastic_rounding

pytestmark = pytest.mark.usefixtures("standard_promotion")

INNER = {
    "adam": optax.adam(1e-3),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2),
    "schedule_free": contrib.schedule_free_adamw(1e-3),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
}


def steps(tx, dtype):
    """The updates of 200 steps with gradients of 1e-4 at fixed weights, and the last state."""
    params = {"w": jnp.ones((8, 4), dtype), "b": jnp.ones(4, dtype)}

    def body(state, noise):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-4 * 2.0**16) * noise, params)
        updates, state = tx.update(grads, state, params)
        return state, updates

    noise = np.random.default_rng(0).uniform(0.5, 1.5, 200).astype(np.float32)
    return jax.jit(lambda: jax.lax.scan(body, tx.init(params), noise))()


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_float16_weights_take_the_steps_of_float32_ones(name, kind):
    inner = INNER[name]
    dynamic = kind == "dynamic"
    tx = dynamic_loss_scaling(inner) if dynamic else static_loss_scaling(inner, 2.0**16)
    (state, found), (expected_state, expected) = steps(tx, jnp.float16), steps(tx, jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, expected_state)


@pytest.mark.parametrize("make", [master_weights, kahan_summation, stochastic_rounding])
def test_what_stores_16_bits_gets_the_weights_as_they_are(make):
    tx = dynamic_loss_scaling(optax.chain(optax.identity(), make(optax.adam(1e-3))))
    state, updates = steps(tx, jnp.float16)
    alone, expected = steps(optax.chain(optax.scale(2.0**-16), make(optax.adam(1e-3))), jnp.float16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), updates, expected)
    own = jax.tree.map(jnp.result_type, state.inner_state[1])
    assert own == jax.tree.map(jnp.result_type, alone[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_weights_have_the_state_that_the_optimizer_makes(dtype):
    inner = optax.adam(1e-3, mu_dtype=jnp.float16)
    params = jnp.ones(4, dtype)
    state = dynamic_loss_scaling(inner).init(params).inner_state
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, inner.init(params))
