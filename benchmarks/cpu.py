"""Seconds on a CPU: training steps and forward passes in float32, by hand and by `autocast`.

    python benchmarks/cpu.py                  # all programs, on a quiet machine: half an hour
    python benchmarks/cpu.py --models GPT     # some alone
    python benchmarks/cpu.py --tiny           # small sizes: does it work?
    python benchmarks/cpu.py --forms          # convolutions, one by one

The variants of a program take turns in one process, round by round, so that what else the machine
does meets all of them. Printed are the minimum and the median of the rounds in milliseconds, how
often float32's minimum holds a variant's, and the share of FLOPs in bfloat16 kernels. PyTorch's own
seconds are those of ``benchmarks/cpu_torch.py``.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.comparison.cases import Case
from benchmarks.comparison.models import Gpt, Lstm, ResNet, Vit
from benchmarks.comparison.variants import float32, handwritten, ours
from benchmarks.cpu_models import Decoding, Digits, Mlp, MobileNetV2, ResNet50
from benchmarks.fast_products import products_in, share_in_kernels
from jmp_autocast import BF16, Policy, autocast, cpu_kernels

GPT = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 8192}
GPT2 = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257}
VIT_B = {"layers": 12, "width": 768, "heads": 12, "patch": 16, "classes": 1000}
BOTH, FORWARD = ("step", "forward"), ("forward",)
CASES = (
    (Case("GPT", Gpt, GPT, (8, 256), 8192), BOTH),
    (Case("GPT-2 small", Gpt, GPT2, (1, 256), 50257), FORWARD),
    (Case("GPT, one token", Gpt, GPT, (8, 1), 8192), FORWARD),
    (Case("Decoding", Decoding, {}, (8, 32), 8192), FORWARD),
    (Case("ViT-B", Vit, VIT_B, (4, 224, 224, 3), 1000), ("step",)),
    (Case("ResNet", ResNet, {"stages": (1, 1, 1), "width": 64}, (16, 32, 32, 3), 100), BOTH),
    (Case("ResNet-50", ResNet50, {}, (4, 224, 224, 3), 1000), FORWARD),
    (Case("MobileNetV2", MobileNetV2, {}, (4, 224, 224, 3), 1000), FORWARD),
    (Case("LSTM", Lstm, {"width": 512, "vocabulary": 4096}, (16, 64), 4096), ("step",)),
    (Case("MLP", Mlp, {}, (512, 16, 16, 3), 10), ("step",)),
    (Case("Digits", Digits, {}, (64, 8, 8, 1), 10), ("step",)),
)
TINY = (
    (Case("GPT", Gpt, {"layers": 1, "width": 64, "heads": 2, "vocabulary": 64}, (2, 16), 64), BOTH),
    (Case("ResNet", ResNet, {"stages": (1, 1), "width": 8}, (2, 8, 8, 3), 100), BOTH),
    (Case("Decoding", Decoding, {"layers": 1, "width": 64}, (2, 4), 8192), FORWARD),
    (Case("MobileNetV2", MobileNetV2, {"stages": ((6, 8, 2, 2),)}, (1, 16, 16, 3), 1000), FORWARD),
)


FORMS: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]]] = {
    "3 x 3": (((16, 32, 32, 64), (3, 3, 64, 64)), {}),
    "3 x 3, stride 2": (((16, 32, 32, 64), (3, 3, 64, 128)), {"window_strides": (2, 2)}),
    "3 x 3, dilated by 2": (((8, 16, 16, 128), (3, 3, 128, 128)), {"rhs_dilation": (2, 2)}),
    "3 x 3, transposed": (
        ((8, 16, 16, 128), (3, 3, 128, 64)),
        {"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))},
    ),
    "7 x 7 of 3 channels, stride 2": (
        ((4, 112, 112, 3), (7, 7, 3, 64)),
        {"window_strides": (2, 2)},
    ),
    "1 x 1": (((16, 32, 32, 64), (1, 1, 64, 128)), {}),
    "3 x 3, 8 groups": (((8, 16, 16, 256), (3, 3, 32, 256)), {"feature_group_count": 8}),
    "3 x 3, depthwise": (((8, 16, 16, 256), (3, 3, 1, 256)), {"feature_group_count": 256}),
    "5, 1-D": (((16, 256, 128), (5, 128, 128)), {}),
    "3 x 3 x 3, 3-D": (((2, 16, 16, 16, 64), (3, 3, 3, 64, 64)), {}),
}
COMPUTE = Policy(jnp.bfloat16, level="compute")
VARIANTS: dict[str, Callable[[Case, Any], Any]] = {
    "float32": float32,
    "by hand": handwritten,
    "ours": ours(lambda dtype: BF16),
    'ours, level "compute"': ours(lambda dtype: COMPUTE),
}


# A compiled program, its arguments, and the seconds that compiling it took.
Timed = tuple[Any, tuple[Any, ...], float]


def programs(case: Case, kinds: Sequence[str]) -> dict[str, dict[str, Timed]]:
    """Compiles what is timed of each variant: program, arguments and seconds of compilation."""
    ((params, batch),) = case.examples(1)
    tx = optax.sgd(1e-2, momentum=0.9) if case.name == "ResNet" else optax.adamw(1e-4)
    state = jax.jit(tx.init)(params)
    found: dict[str, dict[str, Timed]] = {kind: {} for kind in kinds}
    for name, make in VARIANTS.items():
        loss = make(case, jnp.bfloat16)

        def step(params: Any, state: Any, batch: Any, loss: Any = loss) -> Any:
            (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        runs = {"step": (step, (params, state, batch)), "forward": (loss, (params, batch))}
        for kind in kinds:
            fn, args = runs[kind]
            start = time.perf_counter()
            program = jax.jit(fn).lower(*args).compile()
            found[kind][name] = program, args, time.perf_counter() - start
    return found


def timed(variants: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Runs the variants of one program in turns, and returns the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, (program, args, _) in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def rows_of(variants: dict[str, Timed], rounds: int) -> list[list[str]]:
    """Returns a row for each variant of one program."""
    seconds = timed(variants, rounds)
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


def form_rows(name: str, rounds: int) -> list[list[str]]:
    """Returns the rows of a form of convolution: forwards, and the gradients of its operands."""
    shapes, params = FORMS[name]
    rank = len(shapes[0]) - 2
    letters = "DHW"[-rank:]
    numbers = f"N{letters}C", f"{letters}IO", f"N{letters}C"
    given = {"window_strides": (1,) * rank, "padding": "SAME", "dimension_numbers": numbers}
    conv = functools.partial(jax.lax.conv_general_dilated, **given | params)
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
    rows = []
    for kind in ("forward", "gradient of the image", "gradient of the kernel"):
        variants: dict[str, Timed] = {}
        low = autocast(conv, policy=BF16, output_dtype="computed")
        for variant, fn in (("float32", conv), ("ours", low)):
            y = jax.jit(fn)(x, w)
            if kind == "forward":
                run, args = fn, (x, w)
            elif kind == "gradient of the image":
                run, args = (lambda w, y, f=fn: jax.vjp(lambda x: f(x, w), x)[1](y)), (w, y)
            else:
                run, args = (lambda x, y, f=fn: jax.vjp(lambda w: f(x, w), w)[1](y)), (x, y)
            program = jax.jit(run).lower(*args).compile()
            variants[variant] = program, args, 0.0
        seconds = timed(variants, rounds).values()
        rows.append([name, kind, *(f"{1e3 * min(s):.2f}" for s in seconds)])
    return rows


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table."""
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Prints a table for each program."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="names of programs")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--forms", action="store_true", help="convolutions alone, one by one")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {os.cpu_count()} cores: {cpu_kernels.cpu_kernels().reason}")
    if options.forms:
        rows = (row for name in FORMS for row in form_rows(name, options.rounds))
        print_rows(("convolution", "direction", "float32, ms", "ours"), rows)
        return
    header = "variant", "min, ms", "median, ms", "times float32", "in kernels", "compile, s"
    for case, kinds in TINY if options.tiny else CASES:
        if options.models and case.name not in options.models:
            continue
        for kind, variants in programs(case, kinds).items():
            print(f"\n{case}: {kind}")
            print_rows(header, rows_of(variants, options.rounds))


if __name__ == "__main__":
    main()
