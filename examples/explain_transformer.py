"""Shows in which dtypes a small GPT runs, and why: as text, as an HTML page and as a picture.

Nothing is trained or downloaded, and no weights exist: shapes are enough. Run it with::

    python examples/explain_transformer.py
    python examples/explain_transformer.py --dtype float16 --level compute --output report

and open ``report/gradient.html``: links lead from each equation to the cause of its dtype.

It prints the reports of the loss and of its gradient, with the share that stays float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from char_gpt import Gpt, make_loss
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from runs import add_numbers, add_output, folder_of

from jmp_autocast import BF16, FP16, explain
from jmp_autocast.inspect import Report

POLICIES = {"bfloat16": BF16, "float16": FP16}
LEVELS = ("tensor_cores", "o1", "compute")
NUMBERS = {
    "layers": (2, "how many blocks"),
    "width": (256, "features per character"),
    "heads": (4, "attention heads"),
    "context": (128, "characters that the model sees"),
    "batch-size": (32, "windows per step"),
    "vocabulary": (128, "different characters"),
}
# As on the page: they differ for every kind of color vision.
COLORS = {"float16": "#0b6fc2", "bfloat16": "#0b6fc2", "float32": "#bd5407"}
OTHERS = "#697382"


@dataclasses.dataclass(frozen=True)
class Result:
    """What the example has found and written.

    Attributes:
        reports: The reports of the loss and of its gradient.
        files: What was written: a page for each, and the picture.
    """

    reports: dict[str, Report]
    files: list[pathlib.Path]


def functions(options: argparse.Namespace) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Returns the loss and its gradient, and the shapes of their arguments."""
    model = Gpt(options.vocabulary, options.layers, options.width, options.heads)
    pair = make_loss(model)

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        return pair(params, windows)[0]

    windows = jax.ShapeDtypeStruct((options.batch_size, options.context + 1), jnp.int32)
    tokens = jax.ShapeDtypeStruct((options.batch_size, options.context), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    return {"loss": loss, "gradient": jax.grad(loss)}, (params, windows)


# --- picture --------------------------------------------------------------------------------


def modules_of(report: Report, depth: int = 3) -> dict[str, Report]:
    """Returns the part of a report that each module is, in program order."""
    rows: dict[str, list[Any]] = {}
    for row in report.rows:
        if row.scope:
            rows.setdefault("/".join(row.scope.split("/")[:depth]), []).append(row)
    return {name: dataclasses.replace(report, rows=tuple(part)) for name, part in rows.items()}


def draw(reports: dict[str, Report], path: pathlib.Path) -> None:
    """Draws FLOPs and bytes by dtype, and the dtypes of each module's bytes."""
    modules = modules_of(reports["gradient"])
    figure = Figure(figsize=(12, 2.4 + 0.3 * len(modules)), layout="constrained")
    whole, parts = figure.subplots(2, 1, height_ratios=[4, max(4, len(modules))])
    bars = {
        f"{what} of the {name}": {dtype: getattr(s, key) for dtype, s in shares.items()}
        for name, shares in ((name, report.by_dtype()) for name, report in reports.items())
        for key, what in (("flops", "FLOPs"), ("nbytes", "bytes"))
    }
    draw_bars(whole, bars, "FLOPs and bytes by dtype")
    sizes = {
        name: {dtype: share.nbytes for dtype, share in report.by_dtype().items()}
        for name, report in modules.items()
    }
    draw_bars(parts, sizes, "Bytes of the modules by dtype, forward and backward")
    kinds = {"16-bit": "bfloat16", "float32": "float32", "other": ""}
    handles = [parts.barh(0, 0, color=COLORS.get(name, OTHERS)) for name in kinds.values()]
    figure.legend(handles, kinds, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.savefig(path, dpi=120)


def draw_bars(axes: Any, bars: dict[str, dict[str, int]], title: str) -> None:
    """Draws one bar for each name, divided among dtypes."""
    for k, numbers in enumerate(bars.values()):
        total, left = max(sum(numbers.values()), 1), 0.0
        order = sorted(numbers, key=lambda name: list((*COLORS, name)).index(name))
        for dtype in order:
            share = 100 * numbers[dtype] / total
            axes.barh(k, share, left=left, color=COLORS.get(dtype, OTHERS), edgecolor="white")
            if share > 8:
                label = f"{dtype} {share:.0f} %"
                axes.text(left + share / 2, k, label, ha="center", va="center", color="white")
            left += share
    axes.set(yticks=range(len(bars)), yticklabels=list(bars), xlim=(0, 100), xlabel="%")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)


# --- command line ---------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtype", choices=POLICIES, default="bfloat16", help="default: %(default)s"
    )
    parser.add_argument("--level", choices=LEVELS, default="o1", help="default: %(default)s")
    add_numbers(parser, NUMBERS)
    add_output(parser)
    options = parser.parse_args(argv)
    if options.width % options.heads:
        parser.error("--width must be a multiple of --heads")
    return options


def main(argv: Sequence[str] | None = None) -> Result:
    """Explains the GPT that the command line describes.

    Args:
        argv: The arguments, None for those of the process.
    """
    options, console = parse(argv), Console()
    policy = dataclasses.replace(POLICIES[options.dtype], level=options.level)
    fns, arguments = functions(options)
    folder = folder_of(options, "explain_transformer")
    reports: dict[str, Report] = {}
    files: list[pathlib.Path] = []

    def make_report(name: str) -> None:
        reports[name] = explain(fns[name], *arguments, policy=policy)

    def write_page(name: str) -> None:
        files.append(folder / f"{name}.html")
        reports[name].to_html(files[-1])

    def write_picture() -> None:
        files.append(folder / "precision.png")
        draw(reports, files[-1])

    steps = [
        *((f"explain the {name}", functools.partial(make_report, name)) for name in fns),
        *((f"write {name}.html", functools.partial(write_page, name)) for name in fns),
        ("draw precision.png", write_picture),
    ]
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(steps))
        for description, step in steps:
            progress.update(task, description=description)
            step()
            progress.advance(task)
    for report in reports.values():
        console.print(str(report), markup=False, highlight=False, soft_wrap=True)
        console.print()
    for path in files:
        console.print(f"{path}", soft_wrap=True)
    return Result(reports, files)


if __name__ == "__main__":
    main()
