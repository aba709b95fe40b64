"""Trains a small GPT in float32, bfloat16 and float8, several times each, and compares the losses.

float8 is a policy: the products of weights run in 8 bits, everything else as in bfloat16, and there
is no state. An array has one scale, or one for each row. float8 is emulated, so that any
machine rounds as an H100 does. All seeds of a precision train at once, under `jax.vmap`; each has
its own start and its own batches, the same in all precisions::

    python examples/train_float8.py
    python examples/train_float8.py --seeds 2 --steps 100 --output run

It prints, for each precision, the mean loss of the last tenth of the steps, its standard error over
the seeds, the difference from float32 of the same seeds, and the share of the arithmetic in 8 bits,
and draws the losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from char_gpt import Gpt, batch_at, load_text, make_loss
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runs import add_numbers, add_output, folder_of, progress_bar

from jmp_autocast import BF16, Float8, Policy, autocast, explain

CONTEXT, BATCH, WIDTH = 32, 16, 64
FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, emulate=True))
ROWS = Policy(jnp.bfloat16, matmul=Float8(minimum=16, emulate=True, scaling="row"))
POLICIES = {"float32": None, "bfloat16": BF16, "float8": FP8, "float8 by row": ROWS}
COLORS = ("#bd5407", "#0b6fc2", "#7b4fa3", "#2e8540")


@dataclasses.dataclass(frozen=True)
class Trained:
    """What trainings in one precision came to.

    Attributes:
        name: The precision.
        losses: The loss of each step, of shape (steps, seeds).
        share: The share of the arithmetic of matmuls that is in 8 bits.
    """

    name: str
    losses: np.ndarray
    share: float

    @property
    def last(self) -> np.ndarray:
        """The mean loss of the last tenth of the steps, by seed."""
        return self.losses[-max(1, len(self.losses) // 10) :].mean(0)


def train(name: str, options: argparse.Namespace, on_step: Callable[[], None]) -> Trained:
    """Trains all seeds in a precision."""
    text = load_text()
    model = Gpt(text.vocabulary, layers=2, width=WIDTH, heads=4)
    loss, policy = make_loss(model), POLICIES[name]
    low = loss if policy is None else autocast(loss, policy=policy, params=0)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, options.steps))
    seeds = np.arange(options.seeds)

    def start(seed: jax.Array) -> tuple[optax.Params, optax.OptState]:
        tokens = jnp.zeros((1, CONTEXT), jnp.int32)
        params = model.init(jax.random.key(seed), tokens)["params"]
        return params, optimizer.init(params)

    def step(
        params: optax.Params, state: optax.OptState, windows: jax.Array
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        (_, mean), grads = jax.value_and_grad(low, has_aux=True)(params, windows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean

    params, state = jax.jit(jax.vmap(start))(seeds)
    run, losses = jax.jit(jax.vmap(step), donate_argnums=(0, 1)), []
    for i in range(options.steps):
        batches = [batch_at(text.train, BATCH, CONTEXT, seed, i) for seed in seeds]
        params, state, means = run(params, state, np.stack(batches))
        losses.append(np.asarray(means))
        on_step()
    one = jax.tree.map(lambda x: x[0], params)
    share = 0.0 if policy is None else explain(low, one, batches[0]).totals.float8_share
    return Trained(name, np.stack(losses), share)


def show(runs: Sequence[Trained], console: Console) -> None:
    """Prints the losses, and the differences from float32 seed by seed."""
    table = Table(title="GPT of characters")
    for title in ("precision", "loss", "± of the mean", "- float32", "8-bit FLOPs"):
        table.add_column(title, justify="left" if title == "precision" else "right")
    for run in runs:
        error = run.last.std() / np.sqrt(len(run.last))
        difference = (run.last - runs[0].last).mean()
        numbers = (f"{run.last.mean():.4f}", f"{error:.4f}", f"{difference:+.4f}")
        table.add_row(run.name, *numbers, f"{run.share:.1%}")
    console.print(table)


def draw(runs: Sequence[Trained], path: pathlib.Path) -> None:
    """Draws the mean losses over the steps, and their differences from float32."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run, color in zip(runs, COLORS, strict=True):
        window = max(1, len(run.losses) // 30)  # a moving average
        kernel = np.ones(window) / window
        left.plot(
            np.convolve(run.losses.mean(1), kernel, "valid"),
            label=run.name,
            color=color,
            alpha=0.8,
        )
        right.plot(
            np.convolve((run.losses - runs[0].losses).mean(1), kernel, "valid"),
            color=color,
        )
    left.set(xlabel="step", ylabel="loss", title="mean of the seeds")
    left.legend(frameon=False)
    right.set(xlabel="step", title="difference from float32")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Trained]:
    """Trains as the command line asks for; returns the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {
        "steps": (300, "how many steps to train"),
        "seeds": (5, "how many trainings of each"),
    }
    add_numbers(parser, numbers)
    add_output(parser)
    options, console, runs = parser.parse_args(argv), Console(), []
    with progress_bar(console) as progress:
        for name in POLICIES:
            task = progress.add_task(name, total=options.steps)
            runs.append(train(name, options, lambda task=task: progress.advance(task)))
    show(runs, console)
    folder = folder_of(options, "float8")
    draw(runs, folder / "losses.png")
    console.print(f"The picture is in {folder}")
    return runs


if __name__ == "__main__":
    main()
