"""What several examples share: options, a progress bar, a table and a picture of runs.

A run trains the same model in one dtype; the float32 run is what the others are compared with.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jmp_autocast import dynamic_loss_scaling, explain, full_precision, static_loss_scaling

DTYPES = ("float32", "bfloat16", "float16")
COLORS = {"float32": "#bd5407", "bfloat16": "#0b6fc2", "float16": "#3b8f4e"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training in one dtype came to.

    Attributes:
        dtype: What it computes in; parameters and their updates are always float32.
        losses: The loss of each step.
        score: What the example measures at the end, on data that it has not trained on.
        low_flops: The share of the arithmetic of matmuls and convolutions that is in 16 bits.
        skipped_steps: How many steps loss scaling has skipped.
    """

    dtype: str
    losses: list[float]
    score: float
    low_flops: float
    skipped_steps: int = 0

    @property
    def loss(self) -> float:
        """The mean loss of the last tenth of the steps."""
        return float(np.mean(self.losses[-max(1, len(self.losses) // 10) :]))


def make_parser(doc: str | None, steps: int) -> argparse.ArgumentParser:
    """Returns a parser of the options that these examples have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=(*DTYPES, "all"), default="all", help="default: all")
    add_numbers(parser, {"steps": (steps, "how many steps to train")})
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_output(parser)
    return parser


def add_numbers(parser: argparse.ArgumentParser, numbers: dict[str, tuple[int, str]]) -> None:
    """Adds options that take a number of at least 1."""

    def at_least_one(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return int(text)

    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=at_least_one, default=default, help=f"{text} (default: {default})"
        )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the folder where the picture goes."""
    parser.add_argument(
        "--output", type=pathlib.Path, help="folder for what is written; default: a temporary one"
    )


def folder_of(options: argparse.Namespace, name: str) -> pathlib.Path:
    """Returns the folder for what an example writes, and makes it."""
    folder = options.output or pathlib.Path(tempfile.mkdtemp(prefix=f"{name}_"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def optimizer_for(
    dtype: str, optimizer: optax.GradientTransformation, growth_interval: int = 50
) -> optax.GradientTransformation:
    """Returns the optimizer with loss scaling: dynamic in float16, a scale of 1 elsewhere."""
    if dtype == "float16":
        return dynamic_loss_scaling(optimizer, growth_interval=growth_interval)
    return static_loss_scaling(optimizer, 1.0)


def progress_bar(console: Console) -> Progress:
    """Returns a bar with a line for each run."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def run_all(
    options: argparse.Namespace,
    console: Console,
    train: Callable[[str, argparse.Namespace, Callable[[], None]], Run],
) -> list[Run]:
    """Trains in each of the dtypes that the options ask for, float32 first, with a progress bar."""
    runs = []
    with progress_bar(console) as progress:
        for dtype in DTYPES if options.dtype == "all" else (options.dtype,):
            task = progress.add_task(dtype, total=options.steps)
            runs.append(train(dtype, options, lambda task=task: progress.advance(task)))
    return runs


def low_share(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the share of a function's arithmetic, of matmuls and convolutions, in 16 bits."""

    def as_it_runs(*args: Any) -> Any:
        with full_precision():  # what no autocast governs stays as it is
            return fn(*args)

    return explain(as_it_runs, *args).totals.low_share


def show(runs: Sequence[Run], title: str, score: str, console: Console) -> None:
    """Prints the runs as a table, with the differences from float32."""
    table = Table(title=title)
    table.add_column("dtype", vertical="bottom")
    for name in ("loss", "loss / that\nof float32", score, "16-bit\nFLOPs", "skipped\nsteps"):
        table.add_column(name, justify="right")
    full = next((run for run in runs if run.dtype == "float32"), None)
    for run in runs:
        ratio = f"{run.loss / full.loss:.3f}" if full else "-"
        share, skipped = f"{run.low_flops:.1%}", str(run.skipped_steps)
        table.add_row(run.dtype, f"{run.loss:.4f}", ratio, f"{run.score:.4g}", share, skipped)
    console.print(table)


def draw_losses(runs: Sequence[Run], title: str, score: str, path: pathlib.Path) -> None:
    """Draws the loss of each run over the steps, and its score."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for run in runs:
        window = max(1, len(run.losses) // 50)  # a moving average
        smooth = np.convolve(run.losses, np.ones(window) / window, "valid")
        left.plot(smooth, label=run.dtype, color=COLORS[run.dtype], alpha=0.8)
        right.bar(run.dtype, run.score, color=COLORS[run.dtype])
    left.set(xlabel="step", ylabel="loss", title=title, yscale="log")
    left.legend(frameon=False)
    right.set(title=score)
    right.tick_params(axis="x", rotation=30)
    figure.savefig(path, dpi=120)


def finish(
    runs: Sequence[Run], title: str, score: str, folder: pathlib.Path, console: Console
) -> None:
    """Prints the table and writes the picture, ``losses.png``."""
    show(runs, title, score, console)
    draw_losses(runs, title, score, folder / "losses.png")
    console.print(f"Picture: {folder / 'losses.png'}", soft_wrap=True)


# --- the short examples of loss scaling -----------------------------------------------------


def loss_scaling_options(
    doc: str | None, steps: int, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Returns the options of an example that shows the loss scale."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(parser, {"steps": (steps, "how many steps to train")})
    add_output(parser)
    return parser.parse_args(argv)


def draw_scale(losses: Sequence[float], scales: Sequence[float], path: pathlib.Path) -> None:
    """Draws the loss and the loss scale of each step; a skipped step has no finite loss."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    top.plot(losses, color=COLORS["float16"])
    for step in np.flatnonzero(~np.isfinite(losses)):
        top.axvline(step, color="#bd5407", linestyle=":", label="skipped")
    top.set(ylabel="loss", yscale="log")
    if top.get_legend_handles_labels()[1]:
        top.legend(frameon=False)
    bottom.step(range(len(scales)), scales, where="mid", color=COLORS["float16"])
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    figure.savefig(path, dpi=120)
