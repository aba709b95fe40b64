"""Trains a GPT of 124 million parameters in float32, by hand, and under autocast, on one GPU.

    python benchmarks/train_gpt.py                 # within 6 minutes on an H100
    python benchmarks/train_gpt.py --tiny          # on any machine, in a minute or two

AdamW with warm-up, cosine decay, clipped gradients and weight decay, on the words of Python's own
standard library, a twentieth of which is kept for the evaluation. All variants begin with the same
parameters and see the same batches. Each runs in a process of its own, for its own peak of memory.
It prints a table and the loss curves; `--output` also writes both as JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import tables
from comparison.cases import Case
from comparison.models import Gpt
from comparison.variants import VARIANTS

LARGE = Case(
    "GPT", Gpt, {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257}, (8, 1024), 50257
)
TINY = Case("GPT", Gpt, {"layers": 1, "width": 64, "heads": 4, "vocabulary": 2000}, (4, 64), 2000)
NAMES = ("float32", "hand-written", "ours o1", "ours compute")
POINTS = 20
"""Points of a loss curve; each is the mean of the steps since the point before."""


def words(vocabulary: int, files: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the standard library's sources, for training and for evaluation.

    Args:
        vocabulary: The most frequent words are tokens of their own, all others share the last.
        files: How many files are read; None for all.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    found = [p for p in sorted(folder.rglob("*.py")) if "site-packages" not in p.parts][:files]
    text = "\n".join(path.read_text("utf-8", "replace") for path in found)
    split = re.findall(r"\w+|[^\w\s]|\s+", text)
    common = collections.Counter(split).most_common(vocabulary - 1)
    numbers = {word: i for i, (word, _) in enumerate(common)}
    tokens = np.array([numbers.get(word, vocabulary - 1) for word in split], np.int32)
    held_out = len(tokens) // 20
    return tokens[:-held_out], tokens[-held_out:]


def batch_of(tokens: np.ndarray, case: Case, seed: tuple[int, ...]) -> dict[str, Any]:
    """Returns a batch of windows, drawn at random."""
    count, length = case.inputs
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length - 1, (count, 1))
    windows = tokens[starts + np.arange(length + 1)]
    return {"inputs": windows[:, :-1], "labels": windows[:, 1:], "state": {}}


def train(name: str, case: Case, steps: int, files: int | None) -> dict[str, Any]:
    """Trains one variant; returns its curve, its last losses, and what it cost."""
    training, held_out = words(case.labels, files)
    loss = next(v.make for v in VARIANTS if v.name == name)(case, jnp.dtype(jnp.bfloat16))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 6e-4, steps // 10, steps, 6e-5)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    first = batch_of(training, case, (0, 0))
    params = jax.jit(case.build().init)(jax.random.key(0), first["inputs"])["params"]
    state = jax.jit(tx.init)(params)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, first).compile()
    compiling = time.perf_counter() - start
    losses, warm = [], min(10, steps // 2)
    for i in range(steps):
        if i == warm:
            jax.block_until_ready(params)
            start = time.perf_counter()
        params, state, value = compiled(params, state, batch_of(training, case, (0, i)))
        losses.append(value)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    evaluated = jax.jit(lambda params, batch: loss(params, batch)[0])
    held = [evaluated(params, batch_of(held_out, case, (1, i))) for i in range(POINTS)]
    return {
        "curve": [float(np.mean(part)) for part in np.array_split(np.array(losses), POINTS)],
        "held_out": float(np.mean(held)),
        "ms_a_step": 1e3 * seconds / (steps - warm),
        "peak_mb": peak and peak / 1e6,
        "compile_s": compiling,
    }


def report(found: dict[str, dict[str, Any]], steps: int) -> str:
    """Returns the table and the curves in Markdown."""
    cells = [["", "held-out loss", "last training loss", "step, ms", "peak, MB", "to compile, s"]]
    for name, row in found.items():
        peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:,.0f}"
        losses = [f"{row['held_out']:.4f}", f"{row['curve'][-1]:.4f}"]
        cells.append([name, *losses, f"{row['ms_a_step']:.2f}", peak, f"{row['compile_s']:.1f}"])
    curves = [["mean training loss up to step", *found]]
    for i, part in enumerate(np.array_split(np.arange(steps), POINTS)):
        point = [f"{row['curve'][i]:.4f}" for row in found.values()]
        curves.append([str(part[-1] + 1), *point])
    return f"{tables.as_markdown(cells)}\n\n{tables.as_markdown(curves)}"


def main() -> int:
    """Trains each variant in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="one layer of width 64")
    parser.add_argument("--large", action="store_true", help="the default")
    parser.add_argument("--steps", type=int, help="1,000, or 40 of the tiny model")
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file")
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    case, steps = (TINY, chosen.steps or 40) if chosen.tiny else (LARGE, chosen.steps or 1000)
    if chosen.one:
        print(json.dumps(train(chosen.one, case, steps, 40 if chosen.tiny else None)))
        return 0
    found = {}
    for name in chosen.variants:
        command = [sys.executable, __file__, "--one", name, "--steps", str(steps)]
        command += ["--tiny"] if chosen.tiny else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {done.stdout.splitlines()[-1]}", flush=True)
        if chosen.output:
            chosen.output.write_text(json.dumps(found, indent=1))
    print(f"\n{case}, {steps} steps:\n\n{report(found, steps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
