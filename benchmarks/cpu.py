"""Seconds on a CPU: training steps and forward passes in float32, by hand and by `autocast`.

    python benchmarks/cpu.py                  # all programs, on a quiet machine: ten minutes
    python benchmarks/cpu.py --models GPT     # some alone
    python benchmarks/cpu.py --tiny           # small sizes: does it work?

The variants of a program take turns in one process, round by round, so that what else the machine
does meets all of them. Printed are the minimum and the median of the rounds in milliseconds, how
often float32's minimum holds a variant's, and the share of FLOPs in bfloat16 kernels.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.comparison.cases import Case
from benchmarks.comparison.models import Gpt, Lstm, Mixed, ResNet, Vit
from benchmarks.comparison.variants import float32, handwritten, ours
from jmp_autocast import BF16, cpu_kernels
from jmp_autocast.inspect.compiled.products import products_in, share_in_kernels


class Mlp(Mixed):
    """Dense layers on images that are read as rows of numbers."""

    width: int = 1024
    layers: int = 4
    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(images.shape[0], -1)
        for _ in range(self.layers):
            x = nn.relu(self.layer(nn.Dense, self.width)(x))
        return self.layer(nn.Dense, self.classes)(x)


GPT = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 8192}
CASES = (
    Case("GPT", Gpt, GPT, (8, 256), 8192),
    Case("GPT, one token", Gpt, GPT, (8, 1), 8192),
    Case("ViT", Vit, {"layers": 6, "width": 384, "heads": 6, "patch": 8}, (16, 96, 96, 3), 100),
    Case("ResNet", ResNet, {"stages": (1, 1, 1), "width": 64}, (16, 32, 32, 3), 100),
    Case("LSTM", Lstm, {"width": 512, "vocabulary": 4096}, (16, 64), 4096),
    Case("MLP", Mlp, {}, (512, 16, 16, 3), 10),
)
TINY = (
    Case("GPT", Gpt, {"layers": 1, "width": 64, "heads": 2, "vocabulary": 64}, (2, 16), 64),
    Case("ResNet", ResNet, {"stages": (1, 1), "width": 8}, (2, 8, 8, 3), 100),
)
VARIANTS: dict[str, Callable[[Case, Any], Any]] = {
    "float32": float32,
    "by hand": handwritten,
    "ours": ours(lambda dtype: BF16),
    'ours, level "compute"': ours(lambda dtype: BF16.with_level("compute")),
}


def programs(case: Case) -> dict[str, dict[str, tuple[Any, tuple[Any, ...], float]]]:
    """Compiles the step and the forward pass of each variant: program, arguments and seconds."""
    ((params, batch),) = case.examples(1)
    tx = optax.adamw(1e-4)
    state = jax.jit(tx.init)(params)
    found: dict[str, dict[str, tuple[Any, tuple[Any, ...], float]]] = {"step": {}, "forward": {}}
    for name, make in VARIANTS.items():
        loss = make(case, jnp.bfloat16)

        def step(params: Any, state: Any, batch: Any, loss: Any = loss) -> Any:
            (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        for kind, fn, args in (
            ("step", step, (params, state, batch)),
            ("forward", loss, (params, batch)),
        ):
            start = time.perf_counter()
            program = jax.jit(fn).lower(*args).compile()
            found[kind][name] = program, args, time.perf_counter() - start
    return found


def timed(variants: dict[str, tuple[Any, tuple[Any, ...], float]], rounds: int) -> list[list[str]]:
    """Runs the variants of one program in turns, and returns a row for each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, (program, args, _) in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if turn:
                seconds[name].append(time.perf_counter() - start)
    base = min(seconds["float32"])
    return [
        [
            name,
            f"{1e3 * min(seconds[name]):.1f}",
            f"{1e3 * statistics.median(seconds[name]):.1f}",
            f"{base / min(seconds[name]):.2f}",
            f"{100 * share_in_kernels(products_in(program.as_text())):.0f} %",
            f"{compiling:.1f}",
        ]
        for name, (program, _, compiling) in variants.items()
    ]


def main() -> None:
    """Prints a table for each program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="names of programs")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {os.cpu_count()} cores: {cpu_kernels.cpu_kernels().reason}")
    for case in TINY if options.tiny else CASES:
        if options.models and case.name not in options.models:
            continue
        for kind, variants in programs(case).items():
            print(f"\n{case}: {kind}\n")
            print("| variant | min, ms | median, ms | times float32 | in kernels | compile, s |")
            print("|---|---|---|---|---|---|")
            for row in timed(variants, options.rounds):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
