"""Options of the command."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import jax
from comparison import tables

from . import report
from .loop import Outcome, start, train
from .programs import FLOAT32, PRECISIONS
from .tasks import TASKS

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "RESULTS.md"
QUICK = {"seeds": 2, "steps": 3}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains small models in mixed precision.")
    names = [task.name for task in TASKS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    names = [precision.name for precision in PRECISIONS if precision is not FLOAT32]
    default = [precision.name for precision in PRECISIONS[1:] if precision.by_default]
    parser.add_argument("--precisions", nargs="+", choices=names, default=default)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="the default is the model's own number")
    parser.add_argument("--quick", action="store_true", help="{seeds} seeds, {steps} steps".format(
        **QUICK))  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help=f"write into {RESULTS.name}")
    parser.add_argument("--machine", help="its kind, for the table; the default is the device's")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        vars(chosen).update(QUICK)
    if chosen.seeds < 2:
        parser.error(f"--seeds {chosen.seeds}: a standard error needs at least 2")
    return chosen


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Outcome]]:
    """Trains the models, prints the table, and returns the outcomes by model and precision."""
    chosen = options(arguments)
    machine = chosen.machine or jax.devices()[0].device_kind
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    of_seeds = f"seeds {seeds[0]} to {seeds[-1]}"
    head = f"{machine}, JAX {jax.__version__}, {of_seeds}"
    names = [FLOAT32.name, *chosen.precisions]
    found: dict[str, dict[str, Outcome]] = {}
    for task in TASKS:
        if task.name not in chosen.models:
            continue
        begin = start(task, seeds, chosen.steps or task.steps)
        found[task.name] = {p.name: train(task, p, begin) for p in PRECISIONS if p.name in names}
        seconds = ", ".join(f"{o.seconds:.0f}" for o in found[task.name].values())
        print(f"{task.name}: {seconds} s", flush=True)
    rows = report.table(found)
    print(f"\n{head}\n{tables.as_text(rows)}")
    if chosen.markdown:
        text = f"{head}:\n\n{tables.as_markdown(rows)}"
        tables.write_between_markers(RESULTS, f"training {of_seeds} {machine}", text)
    return found
