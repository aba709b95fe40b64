"""Exports a trained classifier in float32, bfloat16 and float16, and loads it without its code.

A network learns digits for some epochs in float32. Its forward pass is then wrapped in `autocast`
and written to a file with `jax.export`, with the weights in it, for batches of any size. A second
process reads the file; it imports JAX, and neither this library nor Flax nor the model::

    python examples/export_classifier.py
    python examples/export_classifier.py --epochs 2 --output exported

It prints, for each dtype, the share of the arithmetic in 16 bits, the size of the file, how far the
probabilities that the second process computes are from those of this one in float32, the share of
test images where both name the same digit, and the accuracy. It draws FLOPs and bytes by dtype, and
the differences of the probabilities.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runs import COLORS, DTYPES, add_numbers, add_output, folder_of, progress_bar
from train_digits import BATCH_SIZE, Cnn, batches, load_data, loss_fn

from jmp_autocast import Policy, autocast, explain
from jmp_autocast.inspect import Report

# What the second process runs: the file, the images and where the answers go.
LOADER = """
import sys
import jax
import jax.export
import numpy as np

program, images, answers = sys.argv[1:]
with open(program, "rb") as file:
    model = jax.export.deserialize(bytearray(file.read()))
images = np.load(images)
found = np.concatenate([model.call(images[:1]), model.call(images[1:])])  # two sizes
np.save(answers, found)
foreign = {"jmp_autocast", "flax"}.intersection(sys.modules)
sys.exit(f"imported: {foreign}" if foreign else 0)
"""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model that was exported, and what the second process got from it.

    Attributes:
        dtype: What its matmuls and convolutions run in.
        path: The file.
        probabilities: What the second process computed, (images, 10).
        difference: The largest difference from the float32 probabilities of this process.
        agreement: The share of images that get the digit that they get in float32.
        accuracy: The share of images that get the right digit.
        report: What `explain` says of the forward pass; None for float32.
    """

    dtype: str
    path: pathlib.Path
    probabilities: np.ndarray
    difference: float
    agreement: float
    accuracy: float
    report: Report | None


def train(epochs: int, seed: int, on_step: Callable[[], None]) -> Any:
    """Returns the parameters of a network that was trained in float32."""
    data, (images, _) = load_data(seed)
    params = jax.jit(Cnn().init)(jax.random.key(seed), images[:1])["params"]
    tx = optax.adam(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        grads = jax.grad(lambda params: loss_fn(params, images, labels))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches(data, epochs, seed):
        params, opt_state = step(params, opt_state, *batch)
        on_step()
    return params


def make_predict(params: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the forward pass with the weights in it."""

    def predict(images: jax.Array) -> jax.Array:
        return jax.nn.softmax(Cnn().apply({"params": params}, images))

    return predict


def export(predict: Callable[[jax.Array], jax.Array], dtype: str, path: pathlib.Path) -> None:
    """Writes the forward pass, for batches of any size."""
    fast = autocast(predict, dtype) if dtype != "float32" else predict
    shape = jax.export.symbolic_shape("batch, 8, 8, 1")
    exported = jax.export.export(jax.jit(fast))(jax.ShapeDtypeStruct(shape, jnp.float32))
    path.write_bytes(exported.serialize())


def load_elsewhere(path: pathlib.Path, images: np.ndarray) -> np.ndarray:
    """Returns what a process computes that has the file alone."""
    inputs, answers = path.with_suffix(".images.npy"), path.with_suffix(".answers.npy")
    np.save(inputs, images)
    subprocess.run([sys.executable, "-c", LOADER, path, inputs, answers], check=True)
    return np.load(answers)


# --- output ---------------------------------------------------------------------------------


def show(results: Sequence[Exported], console: Console) -> None:
    """Prints the table, and the dtypes of the last model."""
    table = Table(title="Exported, and loaded in another process")
    table.add_column("dtype", vertical="bottom")
    names = (
        "16-bit\nFLOPs",
        "file,\nkB",
        "largest\ndifference",
        "same digit\nas float32",
        "accuracy",
    )
    for name in names:
        table.add_column(name, justify="right")
    for r in results:
        share = r.report.totals.low_share if r.report else 0.0
        table.add_row(
            r.dtype,
            f"{share:.0%}",
            f"{r.path.stat().st_size / 1e3:.0f}",
            f"{r.difference:.1e}",
            f"{r.agreement:.1%}",
            f"{r.accuracy:.1%}",
        )
    console.print(table)
    for r in results:
        if r.report:
            console.print(r.report.summary, soft_wrap=True)
            for dtype, part in r.report.by_dtype().items():
                console.print(f"  {dtype}: {part.flops:,} FLOPs, {part.nbytes:,} bytes")


def draw(results: Sequence[Exported], exact: np.ndarray, path: pathlib.Path) -> None:
    """Draws FLOPs and bytes by dtype, and the differences of the probabilities."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars = [(r, key) for r in results if r.report for key in ("flops", "nbytes")]
    for r, key in bars:
        shares = {d: getattr(s, key) for d, s in r.report.by_dtype().items() if d in COLORS}
        name, start = f"{r.dtype}: {'FLOPs' if key == 'flops' else 'bytes'}", 0.0
        for dtype, number in sorted(shares.items(), reverse=True):
            width = 100 * number / sum(shares.values())
            left.barh(name, width, left=start, color=COLORS[dtype], edgecolor="white")
            start += width
    left.set(xlabel="% (orange: float32)", title="In which dtype the model runs")
    for r in results:
        differences = np.sort(np.abs(r.probabilities - exact).max(axis=1))
        right.plot(differences + 1e-9, label=r.dtype, color=COLORS[r.dtype])
    right.set(yscale="log", xlabel="test images, sorted", title="Difference of probabilities")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Exported]:
    """Trains, exports and loads; returns a result for each dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(parser, {"epochs": (8, "how often each training image is seen")})
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_output(parser)
    options, console = parser.parse_args(argv), Console()
    folder = folder_of(options, "export")
    data, (images, labels) = load_data(options.seed)

    results = []
    with progress_bar(console) as progress:
        steps = options.epochs * (len(data[0]) // BATCH_SIZE)
        task = progress.add_task("train", total=steps)
        predict = make_predict(train(options.epochs, options.seed, lambda: progress.advance(task)))
        exact = np.asarray(jax.jit(predict)(images))
        for dtype in progress.track(DTYPES, description="export"):
            path = folder / f"{dtype}.bin"
            export(predict, dtype, path)
            found = load_elsewhere(path, images)
            policy = Policy(dtype) if dtype != "float32" else None
            results.append(
                Exported(
                    dtype=dtype,
                    path=path,
                    probabilities=found,
                    difference=float(np.abs(found - exact).max()),
                    agreement=float(np.mean(found.argmax(-1) == exact.argmax(-1))),
                    accuracy=float(np.mean(found.argmax(-1) == labels)),
                    report=explain(predict, images, policy=policy) if policy else None,
                )
            )
    show(results, console)
    draw(results, exact, folder / "export.png")
    console.print(f"Files and export.png: {folder}", soft_wrap=True)
    return results


if __name__ == "__main__":
    main()
