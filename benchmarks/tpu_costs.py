"""What 16 and 8 bits cost by the TPU compiler's own clock, by generation. It needs no TPU.

    python benchmarks/tpu_costs.py                    # v5e, v6e and TPU7x: some minutes
    python benchmarks/tpu_costs.py --targets v5e --markdown   # into docs/guides/hardware.md

Each row is a pair of small programs, compiled at JAX's default effort; the number is the ratio of
their estimated cycles. The estimate leaves out asynchronous copies, and hardly looks at bytes.
The compiler is libtpu's: pip install "jmp-autocast[bench-tpu]".
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from comparison import tables
from compilers.targets import TPUS, check_installed, devices, prepare_environment
from jax import lax

from jmp_autocast.inspect.compiled.hlo import parse
from jmp_autocast.inspect.compiled.kernels import cycles_of
from jmp_autocast.inspect.compiled.runs import runs

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "hardware.md"
BF16, F32 = jnp.bfloat16, jnp.float32
SQUARE, ROWS, SCORES = (4096, 4096), (8192, 768), (32, 12, 512, 512)

Program = tuple[Callable[..., Any], tuple[tuple[tuple[int, ...], Any], ...]]


def _product(dtype: Any, result: Any = F32) -> Program:
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        contracted = ((1,), (0,)), ((), ())
        return lax.dot_general(x, y, contracted, preferred_element_type=result)

    return fn, ((SQUARE, dtype),) * 2


def _of(fn: Callable[..., Any], dtype: Any, shape: tuple[int, ...] = SQUARE, count: int = 1) -> Any:
    return fn, ((shape, dtype),) * count


def _softmax_inside(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(F32)).astype(x.dtype)


def _column_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, 0, dtype=F32).astype(x.dtype)


BASE = _product(BF16)
PAIRS: dict[str, tuple[Program, Program]] = {
    "`tanh`, 16 bits": (_of(jnp.tanh, BF16), _of(jnp.tanh, F32)),
    "`add` alone, 16 bits": (
        _of(jnp.add, BF16, count=2),
        _of(jnp.add, F32, count=2),
    ),
    "softmax, 16 bits": (
        _of(jax.nn.softmax, BF16, SCORES),
        _of(jax.nn.softmax, F32, SCORES),
    ),
    "softmax, float32 inside": (
        _of(_softmax_inside, BF16, SCORES),
        _of(jax.nn.softmax, F32, SCORES),
    ),
    "sum in float32, rounded once": (
        _of(_column_sums, BF16, ROWS),
        _of(lambda x: jnp.sum(x, 0, dtype=F32), BF16, ROWS),
    ),
    "product, float32 result": (BASE, _product(BF16, BF16)),
    "product, float32 operands": (_product(F32), BASE),
    "product, float16": (_product(jnp.float16), BASE),
    "product, int8": (_product(jnp.int8, jnp.int32), BASE),
    "product, float8_e4m3fn": (_product(jnp.float8_e4m3fn), BASE),
    "product, float8_e5m2": (_product(jnp.float8_e5m2), BASE),
}
"""For each row, the program and what it is divided by: float32, or a product of bfloat16."""


@functools.cache
def cycles(target: str, program: Program) -> int:
    """Returns the cycles that the compiler of a TPU estimates for a program."""
    fn, inputs = program
    sharding = jax.sharding.SingleDeviceSharding(devices(target)[0])
    arguments = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in inputs]
    module = parse(jax.jit(fn).lower(*arguments).compile().as_text())
    return sum(cycles_of(run) or 0 for run in runs(module, lambda run: run.times))


def ratio(target: str, name: str) -> str:
    """Returns the ratio of a row, or that the compiler refuses it."""
    try:
        program, base = (cycles(target, each) for each in PAIRS[name])
    except jax.errors.JaxRuntimeError:
        return "-"
    return f"{program / base:.2f}"


def main() -> int:
    """Compiles all pairs, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--targets", nargs="+", choices=tuple(TPUS), default=["v5e", "v6e", "tpu7x"]
    )
    parser.add_argument("--markdown", action="store_true", help="write into the hardware guide")
    chosen = parser.parse_args()
    prepare_environment()
    for target in chosen.targets:
        check_installed(target)
    cells = [["cycles", *chosen.targets]]
    for name in PAIRS:
        cells.append([name, *(ratio(target, name) for target in chosen.targets)])
        print(" | ".join(cells[-1]), flush=True)
    if chosen.markdown:
        versions = f"JAX {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"
        text = f"{versions}:\n\n{tables.as_markdown(cells)}"
        tables.write_between_markers(GUIDE, "tpu costs", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
