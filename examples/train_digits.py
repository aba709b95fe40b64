"""Trains a small convolutional network on handwritten digits in float32, bfloat16 and float16.

The model, the loss and the training loop are the same for all three dtypes; `train` has the one
line that runs them in mixed precision. The digits are the 1797 images of 8 x 8 pixels that
scikit-learn brings along, so nothing is downloaded. Run it with::

    python examples/train_digits.py
    python examples/train_digits.py --dtype bfloat16 --steps 100

It prints, for each dtype, the loss (and its ratio to that of float32), the share of the test images
that are classified correctly, the share of the arithmetic in 16 bits and the skipped steps, and
draws the losses. The three runs see the same batches and start from the same parameters.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from runs import Run, finish, folder_of, low_share, make_parser, run_all
from sklearn.datasets import load_digits

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
)

BATCH_SIZE = 64

Batch = tuple[np.ndarray, np.ndarray]


class Cnn(nn.Module):
    """Two convolutions and two dense layers, in float32."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of the ten digits for images of shape (n, 8, 8, 1)."""
        x = images
        for features in (16, 32):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(nn.LayerNorm()(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    logits = Cnn().apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def load_data(seed: int) -> tuple[Batch, Batch]:
    """Returns 80 % of the images and labels for training and 20 % for the test."""
    digits = load_digits()
    images = (digits.images[..., None] / 8 - 1).astype(np.float32)
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    return (images[train], labels[train]), (images[test], labels[test])


def batches(data: Batch, epochs: int, seed: int) -> Iterator[Batch]:
    """Yields the full batches of all epochs, each epoch in an order of its own."""
    images, labels = data
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for i in range(len(labels) // BATCH_SIZE):
            chosen = order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]
            yield images[chosen], labels[chosen]


def train(dtype: str, options: argparse.Namespace, on_step: Callable[[], None]) -> Run:
    """Trains a network from scratch in a dtype."""
    fast_loss = loss_fn
    if dtype != "float32":
        fast_loss = autocast(loss_fn, dtype)  # mixed precision: this line is all

    train_data, (images, labels) = load_data(options.seed)
    params = jax.jit(Cnn().init)(jax.random.key(options.seed), images[:1])["params"]
    # float16 needs loss scaling. A scale is a power of two, so the other dtypes are as without it.
    tx = dynamic_loss_scaling(optax.adam(optax.cosine_decay_schedule(3e-3, options.steps)))

    @jax.jit
    def step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, grads = scaled_value_and_grad(fast_loss)(opt_state, params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    epochs = -(-options.steps // (len(train_data[0]) // BATCH_SIZE))
    for batch in itertools.islice(batches(train_data, epochs, options.seed), options.steps):
        params, opt_state, loss = step(params, opt_state, *batch)
        losses.append(float(loss))
        on_step()

    share = low_share(jax.grad(fast_loss), params, *batch)
    predict = Cnn().apply if fast_loss is loss_fn else autocast(Cnn().apply, dtype)
    answers = jax.jit(predict)({"params": params}, images).argmax(-1)
    accuracy = float(jnp.mean(answers == labels))
    return Run(dtype, losses, accuracy, share, int(skipped_steps(opt_state)))


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Trains as the command line asks for; returns the runs."""
    options, console = make_parser(__doc__, steps=330).parse_args(argv), Console()
    runs = run_all(options, console, train)
    finish(runs, "ConvNet on digits", "test accuracy", folder_of(options, "digits"), console)
    return runs


if __name__ == "__main__":
    main()
