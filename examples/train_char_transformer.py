"""Trains a small GPT on English text in float16, with dynamic loss scaling.

The model is in `char_gpt`, and so is the text, which every Python brings along; nothing is
downloaded. Run it with::

    python examples/train_char_transformer.py
    python examples/train_char_transformer.py --dtype float32
    python examples/train_char_transformer.py --output run    # and, after an interruption,
    python examples/train_char_transformer.py --output run --resume

A small model with small batches learns in float16 without loss scaling too. The mean over a batch
divides the gradient of each character by their number, 2048 here. Weighted down by another 1000, as
in a batch of two million, the gradients vanish in float16; with loss scaling they do not::

    python examples/train_char_transformer.py --loss-weight 1e-3
    python examples/train_char_transformer.py --loss-weight 1e-3 --loss-scaling none

It prints the loss and the scale as it trains, then the losses on training and validation text
beside that of the character frequencies, the skipped steps and the share of the arithmetic in 16
bits, and draws loss and scale. Compare the losses with those of ``--dtype float32``.

Mixed precision takes one line in `train` and three in `make_update`. A run writes checkpoints, and
its result is the same bit for bit however often it is killed and resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from char_gpt import Gpt, batch_at, batches_in_order, load_text, make_loss
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from runs import low_share

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    skipped_steps,
    static_loss_scaling,
)

DTYPES = ("float32", "float16", "bfloat16")
NUMBERS = {
    "steps": (300, "how many steps to train"),
    "growth-interval": (50, "good steps after which the scale grows"),
    "layers": (2, "how many blocks"),
    "width": (128, "features per character"),
    "heads": (4, "attention heads"),
    "context": (64, "characters that the model sees"),
    "batch-size": (32, "windows per step"),
    "checkpoint-every": (50, "steps between checkpoints"),
    "log-every": (25, "steps between lines"),
}


# --- training -------------------------------------------------------------------------------


class State(NamedTuple):
    """All that a checkpoint has to hold.

    Attributes:
        params: The parameters of the model, float32.
        opt_state: The state of the optimizer, with the loss scale.
        losses: float32 of shape (steps,), the loss of each step up to now.
        scales: float32 of shape (steps,), the scale that each step used.
    """

    params: Any
    opt_state: Any
    losses: jax.Array
    scales: jax.Array


LossFn = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


def make_update(
    loss_fn: LossFn, options: argparse.Namespace
) -> tuple[optax.GradientTransformation, Callable[[State, int, np.ndarray], State]]:
    """Returns the optimizer, and the function that does one step."""
    schedule = optax.warmup_cosine_decay_schedule(
        0, options.learning_rate, max(1, options.steps // 10), max(2, options.steps)
    )
    # Clipping is inside, where the gradients are unscaled. A small eps, for small loss weights.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-12))
    if options.loss_scaling == "dynamic":
        optimizer = dynamic_loss_scaling(optimizer, growth_interval=options.growth_interval)
    else:
        optimizer = static_loss_scaling(optimizer, 1.0)

    @jax.jit
    def update(state: State, step: int, windows: np.ndarray) -> State:
        gradient = scaled_value_and_grad(loss_fn, has_aux=True)
        (_, loss), grads = gradient(state.opt_state, state.params, windows)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            losses=state.losses.at[step].set(loss),
            scales=state.scales.at[step].set(loss_scale(state.opt_state)),
        )

    return optimizer, update


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training run came to.

    Attributes:
        dtype: What the run computes in.
        loss_scaling: "dynamic" or "none".
        train_loss: The mean loss of the last tenth of the steps.
        validation_loss: The loss on the validation text at the end.
        unigram_entropy: The loss of a model that knows only how frequent each character is.
        low_flops: The share of the arithmetic of a gradient step that is in 16 bits.
        skipped_steps: How many steps were skipped because a gradient was not finite.
        losses: The loss of each step; like the others in nats per character, without the weight.
        scales: The loss scale of each step.
    """

    dtype: str
    loss_scaling: str
    train_loss: float
    validation_loss: float
    unigram_entropy: float
    low_flops: float
    skipped_steps: int
    losses: list[float]
    scales: list[float]


def train(options: argparse.Namespace, console: Console) -> Result:
    """Trains a transformer, from the last checkpoint in ``options.output`` or from scratch."""
    text = load_text()
    model = Gpt(text.vocabulary, options.layers, options.width, options.heads)
    loss_fn = make_loss(model, options.loss_weight)
    if options.dtype != "float32":
        loss_fn = autocast(loss_fn, options.dtype)
    optimizer, update = make_update(loss_fn, options)

    # A batch is a function of the seed and the step, so that a resumed run sees the same ones.
    size = (options.batch_size, options.context)
    windows = batch_at(text.train, *size, options.seed, step=0)
    params = jax.jit(model.init)(jax.random.key(options.seed), windows[:, :-1])["params"]
    state = State(params, optimizer.init(params), *jnp.zeros((2, options.steps)))

    with checkpoints(options.output) as manager, progress_bar(console) as progress:
        state, first = restore(manager, state, options)
        task = progress.add_task(options.dtype, total=options.steps, completed=first)
        for step in range(first, options.steps):
            state = update(state, step, batch_at(text.train, *size, options.seed, step))
            done = step + 1
            if done % options.checkpoint_every == 0 or done == options.steps:
                save(manager, done, state, options)
            if done % options.log_every == 0 or done == options.steps:
                numbers = f"loss {state.losses[step]:.4f}  scale {state.scales[step]:,.0f}"
                console.print(f"step {done:4d}  {numbers}")
            progress.advance(task)

    loss_of = jax.jit(lambda params, windows: loss_fn(params, windows)[1])
    losses = [loss_of(state.params, batch) for batch in batches_in_order(text.validation, *size)]
    gradient = scaled_value_and_grad(loss_fn, has_aux=True)
    return Result(
        dtype=options.dtype,
        loss_scaling=options.loss_scaling,
        train_loss=float(state.losses[-max(1, options.steps // 10) :].mean()),
        validation_loss=float(np.mean(losses)),
        unigram_entropy=text.entropy(),
        low_flops=low_share(gradient, state.opt_state, state.params, windows),
        skipped_steps=int(skipped_steps(state.opt_state)),
        losses=state.losses.tolist(),
        scales=state.scales.tolist(),
    )


# --- checkpoints ----------------------------------------------------------------------------


def checkpoints(output: pathlib.Path) -> ocp.CheckpointManager:
    """Returns what keeps the last two checkpoints; it writes them in the background.

    Orbax writes a checkpoint under another name and renames it when it is complete, so a kill
    leaves the one before as the latest.
    """
    return ocp.CheckpointManager(
        output.resolve() / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )


def save(
    manager: ocp.CheckpointManager, done: int, state: State, options: argparse.Namespace
) -> None:
    """Saves the state after so many steps."""
    items = {
        "state": ocp.args.StandardSave(state),
        "options": ocp.args.JsonSave(decisive(options)),
    }
    manager.save(done, args=ocp.args.Composite(**items))


def restore(
    manager: ocp.CheckpointManager, state: State, options: argparse.Namespace
) -> tuple[State, int]:
    """Returns the state of the latest checkpoint and its step, or what it got and 0."""
    done = manager.latest_step()
    if done is None:
        return state, 0
    if not options.resume:
        sys.exit(f"{options.output} holds checkpoints: pass --resume or another --output.")
    saved = manager.restore(done, args=ocp.args.Composite(options=ocp.args.JsonRestore()))
    if saved["options"] != decisive(options):
        sys.exit(f"{options.output} is of a run with other options: {saved['options']}")
    items = ocp.args.Composite(state=ocp.args.StandardRestore(state))
    return manager.restore(done, args=items)["state"], done


def decisive(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that decide what a run computes."""
    others = ("output", "resume", "checkpoint_every", "log_every")
    return {name: value for name, value in vars(options).items() if name not in others}


# --- output ---------------------------------------------------------------------------------


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def save_curve(result: Result, path: pathlib.Path) -> None:
    """Writes a picture of the loss and of the loss scale over the steps."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    steps = np.arange(1, len(result.losses) + 1)
    top.plot(steps, result.losses)
    top.axhline(result.unigram_entropy, color="gray", linestyle=":", label="unigram entropy")
    top.set(ylabel="loss (nats per character)", title=f"{result.dtype}, {result.loss_scaling}")
    top.legend()
    bottom.step(steps, result.scales, where="mid")
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    figure.savefig(path)


def show(result: Result, console: Console) -> None:
    """Prints the result as a table."""
    table = Table(title="GPT on Python's help topics")
    table.add_column("dtype", vertical="bottom")
    names = ("loss\nscaling", "train\nloss", "val.\nloss", "skipped\nsteps", "final\nscale")
    for name in (*names, "16-bit\nFLOPs"):
        table.add_column(name, justify="right")
    table.add_row(
        result.dtype,
        result.loss_scaling,
        f"{result.train_loss:.4f}",
        f"{result.validation_loss:.4f}",
        str(result.skipped_steps),
        f"{result.scales[-1]:,.0f}",
        f"{result.low_flops:.1%}",
    )
    console.print(table)
    console.print(f"A model of the character frequencies alone: {result.unigram_entropy:.4f}")


# --- command line ---------------------------------------------------------------------------


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that a training run has."""
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="what to compute in")
    parser.add_argument(
        "--loss-scaling",
        choices=("auto", "dynamic", "none"),
        default="auto",
        help="auto: dynamic in float16, none elsewhere",
    )
    for name, (default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument(
        "--loss-weight", type=float, default=1.0, help="what the loss is multiplied with"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="after the warmup")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument(
        "--output", type=pathlib.Path, help="directory for checkpoints, curve.png and result.json"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --output"
    )
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program at options that do not fit together, and fills in what was left open."""
    for name in NUMBERS:
        if getattr(options, name.replace("-", "_")) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.width % options.heads:
        parser.error("--width must be a multiple of --heads")
    if options.resume and not options.output:
        parser.error("--resume needs the --output of the run to go on with")
    if options.loss_scaling == "auto":
        options.loss_scaling = "dynamic" if options.dtype == "float16" else "none"
    options.output = options.output or pathlib.Path(tempfile.mkdtemp(prefix="char_transformer_"))


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains as the command line asks for.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The result, which is also in ``result.json``.
    """
    parser, console = make_parser(__doc__), Console()
    options = parser.parse_args(argv)
    check(parser, options)
    result = train(options, console)
    save_curve(result, options.output / "curve.png")
    (options.output / "result.json").write_text(json.dumps(dataclasses.asdict(result), indent=1))
    show(result, console)
    console.print(f"Checkpoints, curve.png and result.json are in {options.output}", soft_wrap=True)
    return result


if __name__ == "__main__":
    main()
