"""Compares ways to get mixed precision with ``dtype=`` written by hand into a Flax model.

    python benchmarks/vs_handwritten.py            # minutes on two CPU cores
    python benchmarks/vs_handwritten.py --quick    # fewer layers, under two minutes
    python benchmarks/vs_handwritten.py --large    # sizes for a GPU

For a GPT, a ViT, a ResNet and an LSTM it prints what the forward pass keeps for the backward pass,
casts, errors against float64, and times, each with its ratio to the hand-written model in brackets.

On a CPU XLA computes 16-bit dots and most 16-bit arithmetic in float32. Temporary bytes, converts
in the HLO and step times there say nothing about an accelerator; residuals, casts in the jaxpr and
the share of FLOPs do, because they are read from the jaxpr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

# The variants are also measured in processes of their own, which need the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from comparison import report, tables
from comparison.cases import SIZES, Case
from comparison.errors import references
from comparison.measure import LOSS_SCALE, Measurement, gradient, measure, median_step
from comparison.variants import VARIANTS, Variant

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    for name, text in (
        ("tiny", "one layer of width 32, for tests"),
        ("quick", "fewer layers"),
        ("large", "sizes for a GPU"),
    ):
        size.add_argument(
            f"--{name}", dest="size", action="store_const", const=name, default="full", help=text
        )
    parser.add_argument("--dtype", choices=tuple(LOSS_SCALE), default="bfloat16")
    names = [case.name for case in SIZES["full"]]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    names = [variant.name for variant in VARIANTS]
    default = [variant.name for variant in VARIANTS if variant.by_default]
    parser.add_argument("--variants", nargs="+", choices=names, default=default)
    parser.add_argument("--seeds", type=int, default=8, help="examples that errors are averaged of")
    parser.add_argument("--steps", type=int, default=10, help="steps of which the median counts")
    parser.add_argument("--markdown", action="store_true", help=f"write into {RESULTS.name}")
    parser.add_argument("--machine", help="its kind, for the tables; the default is the device's")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def peak_bytes(chosen: argparse.Namespace, case: Case, variant: Variant) -> int | None:
    """Returns the device's peak bytes of a few steps, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", "--models", case.name, "--dtype", chosen.dtype]
    command += ["--variants", variant.name]
    command += [] if chosen.size == "full" else [f"--{chosen.size}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_peak(case: Case, variant: Variant, dtype: str) -> None:
    """Runs a few steps and prints the device's peak bytes."""
    ((params, batch),) = case.examples(1)
    scale = LOSS_SCALE[dtype] if variant.low else 1.0
    median_step(jax.jit(gradient(variant.make(case, jnp.dtype(dtype)), scale)), params, batch, 3)
    print(json.dumps(jax.devices()[0].memory_stats()["peak_bytes_in_use"]))


def precision_of_float32() -> str:
    """Says how the device multiplies float32 matrices."""
    if jax.default_backend() != "gpu":
        return "float32 products in float32"
    setting = jax.config.jax_default_matmul_precision
    exact = setting in ("float32", "highest", "F32_F32_F32")
    return f"TF32 {'off' if exact else 'on'} (jax_default_matmul_precision={setting})"


def measure_case(chosen: argparse.Namespace, case: Case) -> dict[str, Measurement]:
    """Measures every chosen variant of a case."""
    examples = case.examples(chosen.seeds)
    exact = references(case, examples)
    found = {}
    for variant in VARIANTS:
        if variant.name not in chosen.variants:
            continue
        dtype = jnp.dtype(chosen.dtype)
        result = measure(case, variant, dtype, examples, exact, chosen.steps)
        if jax.default_backend() == "gpu":
            result = dataclasses.replace(result, peak=peak_bytes(chosen, case, variant))
            # A run that ends early has said what it measured.
            step, peak = 1e3 * result.seconds["step"], result.peak / 1e6
            print(f"{case.name} {variant.name}: {step:.2f} ms, {peak:.0f} MB", file=sys.stderr)
        found[variant.name] = result
    return found


def torch_rows(chosen: argparse.Namespace, case: Case) -> list[list[str]]:
    """Returns PyTorch's table for the same GPT, or one line that says why there is none."""
    try:
        import torch
    except ImportError:
        return [["PyTorch autocast: torch not installed"]]
    if not torch.cuda.is_available():
        return [["PyTorch autocast: torch has no GPU here"]]
    from comparison import torch_gpt

    return torch_gpt.table(case, chosen.dtype, chosen.steps)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Measurement]]:
    """Runs the comparison and returns the measurements by model and variant."""
    chosen = options(arguments)
    cases = [case for case in SIZES[chosen.size] if case.name in chosen.models]
    if chosen.peak:
        (variant,) = (v for v in VARIANTS if v.name in chosen.variants)
        print_peak(cases[0], variant, chosen.dtype)
        return {}
    machine = chosen.machine or jax.devices()[0].device_kind
    head = f"{machine}, JAX {jax.__version__}, {chosen.dtype}, {precision_of_float32()}"
    print(head)
    written = [f"{head}. In brackets: the ratio to hand-written."]
    everything = {}
    for case in cases:
        found = everything[case.name] = measure_case(chosen, case)
        print(f"\n{case}")
        written.append(f"### {case}")
        for title, columns in report.TABLES.items():
            table = report.rows(columns, found)
            print(f"\n{title}\n{tables.as_text(table)}", flush=True)
            written.append(f"{title}:\n\n{tables.as_markdown(table)}")
        if case.name == "GPT":
            table = torch_rows(chosen, case)
            print(f"\n{tables.as_text(table)}")
            text = tables.as_markdown(table) if len(table) > 1 else table[0][0]
            written.append(text)
    if chosen.markdown:
        name = f"vs_handwritten {chosen.size} {chosen.dtype} {machine}"
        tables.write_between_markers(RESULTS, name, "\n\n".join(written))
    return everything


if __name__ == "__main__":
    main()
