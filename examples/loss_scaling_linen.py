"""Dynamic loss scaling with a Flax Linen `TrainState` and BatchNorm.

The optimizer skips the step of a bad batch by itself. The statistics of BatchNorm are not in it, so
`select_on_finite` holds them back. The data: points, and the quadrants they lie in::

    python examples/loss_scaling_linen.py

It prints losses and scales, and draws both. It compares nothing with float32: the `train_` examples
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from rich.console import Console
from runs import draw_scale, folder_of, loss_scaling_options, progress_bar

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    select_on_finite,
    skipped_steps,
    step_skipped,
)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x)))
        return nn.Dense(4)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


@jax.jit
def train_step(state: TrainState, x: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, x, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, changed["batch_stats"]

    gradient = scaled_value_and_grad(autocast(loss_fn, jnp.float16), has_aux=True)
    (loss, batch_stats), grads = gradient(state.opt_state, state.params, x)
    new = state.apply_gradients(grads=grads)
    finite = ~step_skipped(new.opt_state)
    return new.replace(batch_stats=select_on_finite(finite, batch_stats, state.batch_stats)), loss


def main(argv: Sequence[str] | None = None) -> tuple[float, TrainState]:
    """Returns the accuracy on new points and the final state."""
    options, console = loss_scaling_options(__doc__, 200, argv), Console()
    bad_step = options.steps * 3 // 5
    model = Network()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 2)), train=False)
    tx = dynamic_loss_scaling(optax.adam(1e-2), growth_interval=50)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    losses, scales = [], []
    with progress_bar(console) as progress:
        for step in progress.track(range(options.steps), description="float16"):
            x = jax.random.normal(jax.random.key(step), (128, 2))
            labels = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
            x = x * (jnp.inf if step == bad_step else 1)
            scales.append(float(loss_scale(state)))
            state, loss = train_step(state, x, labels)
            losses.append(float(loss))
            if step % 40 == 0:
                numbers = f"loss {loss:.4f}  next scale {loss_scale(state):9,.0f}"
                console.print(f"step {step:3d}  {numbers}")

    x = jax.random.normal(jax.random.key(1000), (1000, 2))
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    classes = model.apply(variables, x, train=False).argmax(-1)
    accuracy = jnp.mean(classes == 2 * (x[:, 0] > 0) + (x[:, 1] > 0))
    skipped = skipped_steps(state)
    console.print(f"accuracy {accuracy:.1%}, {skipped} of {options.steps} steps skipped")
    path = folder_of(options, "loss_scaling") / "scale.png"
    draw_scale(losses, scales, path)
    console.print(f"Picture: {path}", soft_wrap=True)
    return float(accuracy), state


if __name__ == "__main__":
    main()
