"""Finds which operations of a network must stay in float32, and trains it with the rest in float16.

One block of the network squares large activations, which a float16 cannot hold: in float16 no step
of the training succeeds. `tune` finds the operation, and the policy that it returns is saved to a
file, loaded, and trained with::

    python examples/tune_policy.py
    python examples/tune_policy.py --blocks 8 --loud 5 --output tuned

It prints what was found, and the losses in float32, in float16 and with the policy; it leaves
``policy.toml`` and a picture of the losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from runs import add_numbers, add_output, folder_of

from jmp_autocast import (
    FP16,
    Policy,
    autocast,
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
    tune,
)
from jmp_autocast.inspect import TuneReport

NUMBERS = {
    "blocks": (4, "how many blocks"),
    "width": (32, "features of a block"),
    "steps": (300, "steps of training"),
    "batch-size": (64, "examples per step"),
}
INPUTS = 8
# They differ for every kind of color vision.
COLORS = {"float32": "#bd5407", "float16": "#697382", "tuned": "#0b6fc2"}

Params = dict[str, Any]
Batch = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Result:
    """What the example has found and written.

    Attributes:
        report: What `tune` found.
        losses: The loss of each step, for float32, float16 and the policy.
        skipped: The number of steps that each of the trainings had to skip.
        files: The policy and the picture.
    """

    report: TuneReport
    losses: dict[str, list[float]]
    skipped: dict[str, int]
    files: list[pathlib.Path]


# --- the network ----------------------------------------------------------------------------


def init(key: jax.Array, blocks: int, width: int) -> Params:
    """Returns the weights."""
    keys = iter(jax.random.split(key, 2 + 2 * blocks))

    def weight(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)

    return {
        "in": weight(INPUTS, width),
        "blocks": [
            {"up": weight(width, width), "down": weight(width, width)} for _ in range(blocks)
        ],
        "out": weight(width, 1),
    }


def gate(u: jax.Array) -> jax.Array:
    """The magnitude of a signal from its energy: a float16 ends at 65504."""
    with jax.named_scope("gate"):
        energy = jnp.square(300.0 * u)
        return jnp.sqrt(energy + 1.0) / 300.0


def make_loss(loud: int) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Returns the loss of a network in which one block has large activations.

    Args:
        loud: The number of that block.
    """

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        h = x @ params["in"]
        for i, block in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                u = h @ block["up"]
                h = h + (gate(u) if i == loud else jnp.tanh(u)) @ block["down"]
        with jax.named_scope("head"):
            return jnp.mean(jnp.square(h @ params["out"] - y))

    return loss


def batch_of(key: jax.Array, size: int) -> Batch:
    """Returns examples of a function to learn."""
    x = jax.random.uniform(key, (size, INPUTS), minval=-1.0, maxval=1.0)
    return x, jnp.sin(2.0 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


# --- training -------------------------------------------------------------------------------


def train(
    loss: Callable[..., jax.Array],
    params: Params,
    batches: Sequence[Batch],
    advance: Callable[[], None],
) -> tuple[list[float], int]:
    """Returns the loss of each step, and the number of steps that were skipped."""
    optimizer = dynamic_loss_scaling(optax.adam(3e-3))

    @jax.jit
    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = scaled_value_and_grad(loss)(state, params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for x, y in batches:
        params, state, value = step(params, state, x, y)
        losses.append(float(value))
        advance()
    return losses, int(skipped_steps(state))


def draw(losses: dict[str, list[float]], pins: Sequence[str], path: pathlib.Path) -> None:
    """Draws the losses; what is not finite cannot be drawn, and the legend says so."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        finite = np.isfinite(values)
        label = name if finite.all() else f"{name}: {np.mean(~finite):.0%} of the losses not finite"
        shown = np.where(finite, values, np.nan)
        style = "--" if name == "tuned" else "-"
        axes.plot(shown, style, color=COLORS[name], label=label, linewidth=1.8)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.set_title(f"Kept in float32: {', '.join(pins)}", loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


# --- command line ---------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(parser, NUMBERS)
    parser.add_argument(
        "--loud", type=int, default=2, help="the block with large activations (default: 2)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="the largest relative error of the loss and its gradients (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_output(parser)
    options = parser.parse_args(argv)
    if not 0 <= options.loud < options.blocks:
        parser.error("--loud must be the number of a block, counted from 0")
    if not 0 < options.tolerance < math.inf:
        parser.error("--tolerance must be a positive number")
    return options


def main(argv: Sequence[str] | None = None) -> Result:
    """Tunes and trains the network that the command line describes.

    Args:
        argv: The arguments, None for those of the process.
    """
    options, console = parse(argv), Console()
    keys = jax.random.split(jax.random.key(options.seed), options.steps + 1)
    params = init(keys[0], options.blocks, options.width)
    batches = [batch_of(key, options.batch_size) for key in keys[1:]]
    loss = make_loss(options.loud)
    folder = folder_of(options, "tune_policy")

    report = tune(
        loss,
        batches=[(params, *batch) for batch in batches[:4]],
        policy=FP16,
        tolerance=options.tolerance,
        argnums=0,  # the gradients count, too: it shall train
    )
    print(report)
    file = folder / "policy.toml"
    report.policy.save(file)

    functions = {
        "float32": loss,
        "float16": autocast(loss, policy=FP16),
        "tuned": autocast(loss, policy=Policy.load(file)),
    }
    losses, skipped = {}, {}
    columns = (TextColumn("train in {task.description:<8}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        for name, function in functions.items():
            task = progress.add_task(name, total=options.steps)
            losses[name], skipped[name] = train(
                function, params, batches, lambda task=task: progress.advance(task)
            )
    for name in functions:
        console.print(f"{name:8} last loss {losses[name][-1]:.4g}, {skipped[name]} steps skipped")
    picture = folder / "losses.png"
    pins = [f"{kept.primitive} in {kept.scope}" for kept in report.kept]
    draw(losses, pins or ["nothing"], picture)
    for path in (file, picture):
        console.print(f"{path}", soft_wrap=True)
    return Result(report, losses, skipped, [file, picture])


if __name__ == "__main__":
    main()
