"""Dynamic loss scaling with Flax NNX and `nnx.Optimizer`.

A small network learns in float16 in which quadrant a point lies. One batch is bad on purpose: its
step is skipped, and the scale backs off::

    python examples/loss_scaling_nnx.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    skipped_steps,
)

BAD_STEP = 120


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(2, 64, rngs=rngs)
        self.out = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer, x: jax.Array, labels: jax.Array
) -> jax.Array:
    graphdef, params = nnx.split(model, nnx.Param)

    def loss_fn(params: nnx.State, x: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    gradient = scaled_value_and_grad(autocast(loss_fn, compute_dtype=jnp.float16))
    loss, grads = gradient(optimizer.opt_state, params, x)
    optimizer.update(model, grads)
    return loss


def main() -> tuple[float, nnx.Optimizer]:
    """Returns the accuracy on new points and the optimizer."""
    model = Network(nnx.Rngs(0))
    tx = dynamic_loss_scaling(optax.adam(1e-2), growth_interval=50)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step in range(200):
        x = jax.random.normal(jax.random.key(step), (128, 2))
        labels = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
        loss = train_step(model, optimizer, x * (jnp.inf if step == BAD_STEP else 1), labels)
        if step % 40 == 0:
            print(f"step {step:3d}  loss {loss:.4f}  next scale {loss_scale(optimizer):9,.0f}")

    x = jax.random.normal(jax.random.key(1000), (1000, 2))
    accuracy = jnp.mean(model(x).argmax(-1) == 2 * (x[:, 0] > 0) + (x[:, 1] > 0))
    print(f"accuracy {accuracy:.1%}, {skipped_steps(optimizer)} of 200 steps skipped")
    return float(accuracy), optimizer


if __name__ == "__main__":
    main()
