"""Dynamic loss scaling in plain JAX: the training loop holds the scale itself.

A small network fits a curve in float16 by gradient descent that is written out. One batch is bad on
purpose: its step is skipped, and the scale backs off::

    python examples/loss_scaling_plain.py

It prints losses and scales, and draws both. It compares nothing with float32: the `train_` examples
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from runs import draw_scale, folder_of, loss_scaling_options, progress_bar

from jmp_autocast import (
    LossScale,
    autocast,
    finite_value_and_grad,
    select_on_finite,
)

LEARNING_RATE = 0.03


def loss_fn(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean(jnp.square(hidden @ params["w2"] + params["b2"] - y))


@jax.jit
def train_step(
    params: dict[str, jax.Array], scale: LossScale, x: jax.Array, y: jax.Array
) -> tuple[Any, LossScale, jax.Array, jax.Array]:
    gradient = finite_value_and_grad(autocast(loss_fn, jnp.float16))
    scale, finite, loss, grads = gradient(scale, params, x, y)
    new_params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
    # Of a step whose gradients are not finite nothing may stay.
    return select_on_finite(finite, new_params, params), scale, finite, loss


def main(argv: Sequence[str] | None = None) -> tuple[float, LossScale]:
    """Returns the last loss and the final scale."""
    options, console = loss_scaling_options(__doc__, 400, argv), Console()
    bad_step = options.steps * 3 // 8
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w1": jax.random.normal(keys[0], (1, 32)),
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(keys[1], (32, 1)) / 32**0.5,
        "b2": jnp.zeros(1),
    }
    x = jnp.linspace(-2, 2, 64)[:, None]
    y = jnp.sin(2 * x)

    scale = LossScale.dynamic(growth_interval=100)
    losses, scales = [], []
    with progress_bar(console) as progress:
        for step in progress.track(range(options.steps), description="float16"):
            target = jnp.full_like(y, jnp.inf) if step == bad_step else y
            scales.append(float(scale.scale))
            params, scale, finite, loss = train_step(params, scale, x, target)
            losses.append(float(loss))
            if step % 50 == 0 or not finite:
                note = "" if finite else "  skipped"
                numbers = f"loss {loss:.4f}  next scale {scale.scale:9,.0f}"
                console.print(f"step {step:3d}  {numbers}{note}")
    console.print(f"{scale.skipped_steps} of {options.steps} steps skipped")
    path = folder_of(options, "loss_scaling") / "scale.png"
    draw_scale(losses, scales, path)
    console.print(f"Picture: {path}", soft_wrap=True)
    return float(loss), scale


if __name__ == "__main__":
    main()
