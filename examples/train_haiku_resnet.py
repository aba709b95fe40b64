"""Trains a small Haiku ResNet with BatchNorm in float32, bfloat16 and float16.

`autocast` goes around a loss that calls `apply` of `hk.transform_with_state`; the model knows
nothing of it. The digits are the 1797 images that scikit-learn brings along::

    python examples/train_haiku_resnet.py
    python examples/train_haiku_resnet.py --dtype bfloat16 --steps 100 --channels 32

It prints, for each dtype, the loss (and its ratio to that of float32), the share of the test images
that are classified correctly, the share of a gradient step's arithmetic in 16 bits and the skipped
steps, and draws the losses. The three runs see the same batches and start from the same parameters.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from runs import (
    Run,
    add_numbers,
    finish,
    folder_of,
    low_share,
    make_parser,
    optimizer_for,
    run_all,
)
from train_digits import BATCH_SIZE, batches, load_data

from jmp_autocast import (
    autocast,
    scaled_value_and_grad,
    select_on_finite,
    skipped_steps,
    step_skipped,
)


class ResidualBlock(hk.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels: int, stride: int, name: str | None = None) -> None:
        super().__init__(name)
        self.channels, self.stride = channels, stride

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        shortcut = x
        if self.stride != 1 or x.shape[-1] != self.channels:
            shortcut = hk.Conv2D(self.channels, 1, self.stride, with_bias=False, name="project")(x)
        for i, stride in enumerate((self.stride, 1)):
            x = jax.nn.relu(x) if i else x
            x = hk.Conv2D(self.channels, 3, stride, with_bias=False, name=f"conv{i}")(x)
            x = hk.BatchNorm(True, True, 0.9, name=f"norm{i}")(x, is_training=train)
        return jax.nn.relu(x + shortcut)


def make_model(channels: int, blocks: int) -> hk.TransformedWithState:
    """Returns a ResNet for images of shape (n, 8, 8, 1); each block after the first halves them."""

    def forward(images: jax.Array, train: bool) -> jax.Array:
        x = jax.nn.relu(hk.Conv2D(channels, 3, name="stem")(images))
        for i in range(blocks):
            x = ResidualBlock(channels * 2**i, 2 if i else 1, name=f"block{i}")(x, train)
        return hk.Linear(10, name="head")(x.mean(axis=(1, 2)))

    return hk.without_apply_rng(hk.transform_with_state(forward))


def train(dtype: str, options: argparse.Namespace, on_step: Callable[[], None]) -> Run:
    """Trains a ResNet from scratch in a dtype."""
    model, low = make_model(options.channels, options.blocks), dtype != "float32"

    def loss_fn(
        params: Any, state: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, Any]:
        logits, state = model.apply(params, state, images, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, state

    cast = (lambda fn: autocast(fn, dtype)) if low else (lambda fn: fn)
    fast_loss = cast(loss_fn)
    schedule = optax.cosine_decay_schedule(3e-3, options.steps)
    tx = optimizer_for(dtype, optax.adam(schedule))

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        gradient = scaled_value_and_grad(fast_loss, has_aux=True)
        (loss, changed), grads = gradient(opt_state, params, state, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        state = select_on_finite(~step_skipped(opt_state), changed, state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    train_data, (images, labels) = load_data(options.seed)
    key = jax.random.key(options.seed)
    params, state = jax.jit(model.init, static_argnames="train")(key, images[:1], train=True)
    opt_state = tx.init(params)
    epochs = -(-options.steps // (len(train_data[0]) // BATCH_SIZE))
    losses = []
    for batch in itertools.islice(batches(train_data, epochs, options.seed), options.steps):
        params, state, opt_state, loss = step(params, state, opt_state, *batch)
        losses.append(float(loss))
        on_step()

    predict = jax.jit(cast(lambda params, state, x: model.apply(params, state, x, train=False)[0]))
    accuracy = float(jnp.mean(predict(params, state, images).argmax(-1) == np.asarray(labels)))
    share = low_share(jax.grad(fast_loss, has_aux=True), params, state, *batch)
    return Run(dtype, losses, accuracy, share, int(skipped_steps(opt_state)))


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Trains as the command line asks for; returns the runs."""
    parser, console = make_parser(__doc__, steps=220), Console()
    numbers = {"blocks": (3, "residual blocks"), "channels": (16, "channels of the first block")}
    add_numbers(parser, numbers)
    options = parser.parse_args(argv)
    runs = run_all(options, console, train)
    finish(runs, "ResNet on digits (Haiku)", "test accuracy", folder_of(options, "haiku"), console)
    return runs


if __name__ == "__main__":
    main()
