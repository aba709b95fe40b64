"""Dynamic loss scaling with Flax NNX and `nnx.Optimizer`.

A small network learns in float16 in which quadrant a point lies. One batch is bad on purpose: its
step is skipped, and the scale backs off::

    python examples/loss_scaling_nnx.py

It prints losses and scales, and draws both. It compares nothing with float32: the `train_` examples
do.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from runs import draw_scale, folder_of, loss_scaling_options, progress_bar

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    skipped_steps,
)


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

    gradient = scaled_value_and_grad(autocast(loss_fn, jnp.float16))
    loss, grads = gradient(optimizer.opt_state, params, x)
    optimizer.update(model, grads)
    return loss


def main(argv: Sequence[str] | None = None) -> tuple[float, nnx.Optimizer]:
    """Returns the accuracy on new points and the optimizer."""
    options, console = loss_scaling_options(__doc__, 200, argv), Console()
    bad_step = options.steps * 3 // 5
    model = Network(nnx.Rngs(0))
    tx = dynamic_loss_scaling(optax.adam(1e-2), growth_interval=50)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses, scales = [], []
    with progress_bar(console) as progress:
        for step in progress.track(range(options.steps), description="float16"):
            x = jax.random.normal(jax.random.key(step), (128, 2))
            labels = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
            x = x * (jnp.inf if step == bad_step else 1)
            scales.append(float(loss_scale(optimizer)))
            loss = train_step(model, optimizer, x, labels)
            losses.append(float(loss))
            if step % 40 == 0:
                numbers = f"loss {loss:.4f}  next scale {loss_scale(optimizer):9,.0f}"
                console.print(f"step {step:3d}  {numbers}")

    x = jax.random.normal(jax.random.key(1000), (1000, 2))
    accuracy = jnp.mean(model(x).argmax(-1) == 2 * (x[:, 0] > 0) + (x[:, 1] > 0))
    skipped = skipped_steps(optimizer)
    console.print(f"accuracy {accuracy:.1%}, {skipped} of {options.steps} steps skipped")
    path = folder_of(options, "loss_scaling") / "scale.png"
    draw_scale(losses, scales, path)
    console.print(f"Picture: {path}", soft_wrap=True)
    return float(accuracy), optimizer


if __name__ == "__main__":
    main()
