"""Trains a Flax NNX network with BatchNorm and Dropout in float32, bfloat16 and float16.

The statistics of BatchNorm and the counts of Dropout's random stream change in the modules as they
do without `autocast`. In float16 a step whose gradients overflow is skipped, and the statistics of
its batch are put back. The digits are the 1797 images that scikit-learn brings along::

    python examples/train_nnx.py
    python examples/train_nnx.py --dtype float16 --steps 200 --output run

It prints, for each dtype, the loss (and its ratio to that of float32), the share of the test images
that are classified correctly, the share of the arithmetic in 16 bits and the skipped steps, and
draws the losses. The three runs see the same batches and start from the same parameters.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from runs import Run, finish, folder_of, make_parser, optimizer_for, run_all
from train_digits import BATCH_SIZE, batches, load_data

from jmp_autocast import explain, loss_scale, select_on_finite, skipped_steps, step_skipped
from jmp_autocast.integrations.nnx import autocast


class ConvNet(nnx.Module):
    """Two convolutions with BatchNorm, Dropout, and two dense layers. It knows of no precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, rngs=rngs)
        self.hidden = nnx.Linear(4 * 32, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of the ten digits for images of shape (n, 8, 8, 1)."""
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(images))), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.out(self.dropout(x))


def loss_fn(net: ConvNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(net(images), labels).mean()


def train(dtype: str, options: argparse.Namespace, on_step: Callable[[], None]) -> Run:
    """Trains a network from scratch in a dtype."""
    low = dtype != "float32"
    fast_loss = autocast(loss_fn, dtype if low else None, enabled=low)

    @nnx.jit
    def step(
        net: ConvNet, optimizer: nnx.Optimizer, images: np.ndarray, labels: np.ndarray
    ) -> jax.Array:
        scale = loss_scale(optimizer)
        before = nnx.state(nnx.clone(net), nnx.BatchStat)

        def scaled(net: ConvNet) -> tuple[jax.Array, jax.Array]:
            loss = fast_loss(net, images, labels)
            return loss * scale, loss

        (_, loss), grads = nnx.value_and_grad(scaled, has_aux=True)(net)
        optimizer.update(net, grads)  # unscales, and skips a step that is not finite
        after = nnx.state(net, nnx.BatchStat)
        nnx.update(net, select_on_finite(~step_skipped(optimizer), after, before))
        return loss

    train_data, (images, labels) = load_data(options.seed)
    net = ConvNet(nnx.Rngs(options.seed))
    schedule = optax.cosine_decay_schedule(3e-3, options.steps)
    optimizer = nnx.Optimizer(net, optimizer_for(dtype, optax.adam(schedule)), wrt=nnx.Param)
    epochs = -(-options.steps // (len(train_data[0]) // BATCH_SIZE))
    losses = []
    for batch in itertools.islice(batches(train_data, epochs, options.seed), options.steps):
        losses.append(float(step(net, optimizer, *batch)))
        on_step()

    share = explain(fast_loss, net, *batch).totals.low_share if low else 0.0
    net.eval()
    predict = nnx.jit(autocast(lambda net, x: net(x), dtype if low else None))
    logits = predict(net, images) if low else nnx.jit(lambda net, x: net(x))(net, images)
    accuracy = float(jnp.mean(logits.argmax(-1) == labels))
    return Run(dtype, losses, accuracy, share, int(skipped_steps(optimizer)))


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Trains as the command line asks for; returns the runs."""
    options, console = make_parser(__doc__, steps=330).parse_args(argv), Console()
    runs = run_all(options, console, train)
    finish(runs, "ConvNet on digits (NNX)", "test accuracy", folder_of(options, "nnx"), console)
    return runs


if __name__ == "__main__":
    main()
