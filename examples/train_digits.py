"""Trains a small convolutional network on handwritten digits in float32, float16 and bfloat16.

The model, the loss and the training loop are the same for all three; `train` has the one line
that runs them in mixed precision. The digits are the 1797 images of 8 x 8 pixels that
scikit-learn brings along, so nothing is downloaded. Run it with::

    python examples/train_digits.py
    python examples/train_digits.py --dtype bfloat16 --epochs 5

It prints, for each dtype, accuracy and loss, the share of the arithmetic in 16 bits, the casts and
the time of a step, and draws the accuracies and some digits with the answers of the last run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

from jmp_autocast import autocast, op_stats

DTYPES = ("float32", "float16", "bfloat16")
BATCH_SIZE = 64

# float16 holds nothing below 6e-8, so there the loss is multiplied by a constant and the gradients
# are divided by it, by hand. `train_char_transformer` has the library's loss scaling, which finds
# the constant by itself. bfloat16 has the range of float32 and needs none.
LOSS_SCALE = {"float32": 1.0, "float16": 1024.0, "bfloat16": 1.0}

Batch = tuple[np.ndarray, np.ndarray]
FLOATS = {"float32", "float16", "bfloat16"}


# --- model and data: nothing here knows of mixed precision ----------------------------------


class Cnn(nn.Module):
    """Two convolutions and two dense layers."""

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


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross entropy of a batch, and the logits."""
    logits = Cnn().apply({"params": params}, images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, logits


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


# --- training -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training run came to.

    Attributes:
        dtype: What the run computes in.
        accuracy: The share of the test images that it classifies correctly.
        loss: The mean training loss of the last epoch.
        low_flops: Of the arithmetic of the matmuls and convolutions in a gradient step, the share
            in 16 bits.
        all_low: Whether every matmul and convolution, forward and backward, reads 16-bit operands.
        casts: The number of casts between floating point dtypes in the gradient step.
        step_ms: The median time of a training step, in milliseconds.
        losses: The loss of each step.
        answers: The digit that it takes each test image for.
    """

    dtype: str
    accuracy: float
    loss: float
    low_flops: float
    all_low: bool
    casts: int
    step_ms: float
    losses: list[float]
    answers: list[int]


def train(dtype: str, epochs: int, seed: int, on_step: Callable[[], None] = lambda: None) -> Result:
    """Trains a network from scratch.

    Args:
        dtype: What to compute in; parameters and their updates are always float32.
        epochs: How often each training image is seen.
        seed: Determines the split, the initial parameters and the order of the images.
        on_step: Called after each step.

    Returns:
        The result on the test images.
    """
    model_loss = loss_fn
    if dtype != "float32":
        model_loss = autocast(loss_fn, compute_dtype=dtype)  # mixed precision: this line is all

    train_data, test_data = load_data(seed)
    steps = epochs * (len(train_data[0]) // BATCH_SIZE)
    params = jax.jit(Cnn().init)(jax.random.key(seed), test_data[0][:1])["params"]
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    state = optimizer.init(params)
    scale = LOSS_SCALE[dtype]

    def scaled_loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return scale * model_loss(params, images, labels)[0]

    def gradient_step(params: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        loss, grads = jax.value_and_grad(scaled_loss)(params, images, labels)
        return loss / scale, jax.tree.map(lambda g: g / scale, grads)

    @jax.jit
    def update(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, grads = gradient_step(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses, times = [], []
    for images, labels in batches(train_data, epochs, seed):
        start = time.perf_counter()
        params, state, loss = update(params, state, images, labels)
        losses.append(float(loss))  # waits for the step
        times.append(time.perf_counter() - start)
        on_step()

    _, logits = jax.jit(model_loss)(params, *test_data)
    low_flops, all_low, casts = count(gradient_step, params, images, labels)
    return Result(
        dtype=dtype,
        accuracy=float(np.mean(np.argmax(logits, -1) == test_data[1])),
        loss=statistics.fmean(losses[-steps // epochs :]),
        low_flops=low_flops,
        all_low=all_low,
        casts=casts,
        step_ms=1e3 * statistics.median(times[1:]),  # the first step compiles
        losses=losses,
        answers=np.argmax(logits, -1).tolist(),
    )


# --- reading the program --------------------------------------------------------------------


def count(fn: Callable[..., Any], *args: Any) -> tuple[float, bool, int]:
    """Returns the low precision share of a function's arithmetic, whether it is all, and casts."""
    total = low = casts = 0
    for op in op_stats(fn, *args):
        if op.primitive in ("dot_general", "conv_general_dilated"):
            total += op.flops
            low += op.flops if "float32" not in op.operands else 0
        elif op.primitive == "convert_element_type" and op.operands != op.results:
            casts += op.times if {*op.operands, *op.results} <= FLOATS else 0
    return low / total, low == total, casts


# --- command line ---------------------------------------------------------------------------


def show(results: Sequence[Result], console: Console) -> None:
    """Prints the results as a table."""
    table = Table(title="Digits, test set")
    table.add_column("dtype", vertical="bottom")
    for name in ("accuracy", "loss", "16-bit\nFLOPs", "all\n16-bit", "casts", "ms per\nstep"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.dtype,
            f"{r.accuracy:.2%}",
            f"{r.loss:.4f}",
            f"{r.low_flops:.1%}",
            "yes" if r.all_low else "no",
            str(r.casts),
            f"{r.step_ms:.2f}",
        )
    console.print(table)


def draw(results: Sequence[Result], seed: int, path: pathlib.Path) -> None:
    """Draws the losses, and test images with the answers of the last run, wrong ones first."""
    images, labels = load_data(seed)[1]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for result in results:
        axes.plot(result.losses, label=f"{result.dtype}: {result.accuracy:.1%}", alpha=0.7)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Loss, and accuracy on test images")
    axes.legend(frameon=False)
    answers = np.array(results[-1].answers)
    for ax, i in zip(
        right.subplots(3, 6).flat, np.argsort(answers == labels, kind="stable"), strict=False
    ):
        ax.imshow(images[i, ..., 0], cmap="gray_r")
        ax.set_title(answers[i], color="#bd5407" if answers[i] != labels[i] else "black", pad=2)
        ax.axis("off")
    right.suptitle(f"{results[-1].dtype}: answers, wrong ones first")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Trains with the dtypes that the command line asks for, one after the other.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The result of each run.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=(*DTYPES, "all"), default="all", help="default: all")
    parser.add_argument("--epochs", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--output", type=pathlib.Path, help="folder for the picture; default: a temporary one"
    )
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")

    console = Console()
    steps = options.epochs * (len(load_data(options.seed)[0][0]) // BATCH_SIZE)
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn())
    results = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for dtype in DTYPES if options.dtype == "all" else (options.dtype,):
            task = progress.add_task(dtype, total=steps)
            advance = functools.partial(progress.advance, task)
            results.append(train(dtype, options.epochs, options.seed, advance))
    show(results, console)
    folder = options.output or pathlib.Path(tempfile.mkdtemp(prefix="digits_"))
    folder.mkdir(parents=True, exist_ok=True)
    draw(results, options.seed, folder / "digits.png")
    console.print(f"Picture: {folder / 'digits.png'}", soft_wrap=True)
    return results


if __name__ == "__main__":
    main()
