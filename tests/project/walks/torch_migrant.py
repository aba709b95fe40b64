"""A migrant from torch.amp: the training step of the migration page, with all that goes with it."""

import jax
import jax.numpy as jnp
import optax

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    full_precision,
    loss_scale,
    scaled_value_and_grad,
    skipped_steps,
)


def loss(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    with full_precision():  # as x.float() protects an operation
        out = hidden @ params["w2"]
    return jnp.mean((out - y) ** 2)


def init():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w1": jax.random.normal(keys[0], (8, 32)) / 3,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(keys[1], (32, 1)) / 6,
    }


x = jax.random.normal(jax.random.key(1), (64, 8))
y = jnp.sin(x[:, :1])

# Clipping and the accumulation of two batches stand inside the loss scaling.
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
tx = dynamic_loss_scaling(optax.MultiSteps(inner, 2), growth_interval=8)
half_loss = autocast(loss, jnp.float16)


@jax.jit
def train_step(params, opt_state, x, y):
    value, grads = scaled_value_and_grad(half_loss)(opt_state, params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


params, opt_state = init(), tx.init(init())
losses = []
for i in range(40):
    batch = x * jnp.inf if i == 5 else x
    before = params
    params, opt_state, value = train_step(params, opt_state, batch, y)
    if i == 5:
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params, before)
        print("a bad batch moves nothing:", all(jax.tree.leaves(same)))
    losses.append(value)
print("skipped:", skipped_steps(opt_state), "scale:", loss_scale(opt_state))
print("loss below half of the first:", bool(losses[-1] < losses[0] / 2))

# The same in float32, by the plain optimizer.
plain = optax.MultiSteps(inner, 2)


@jax.jit
def plain_step(params, opt_state):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, opt_state = plain.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


params, opt_state, expected = init(), plain.init(init()), []
for _ in range(5):
    params, opt_state, value = plain_step(params, opt_state)
    expected.append(value)
near = [bool(abs(a - b) < 1e-2 * b) for a, b in zip(losses[:5], expected, strict=True)]
print("as in float32:", all(near))
like_torch = autocast(lambda x: x @ x.T, jnp.float16, output_dtype="computed")
print("torch's result:", like_torch(x).dtype, "ours:", half_loss(params, x, y).dtype)
