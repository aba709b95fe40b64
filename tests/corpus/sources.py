"""Where the programs come from: with `tables` what knows where the tests keep their programs.

Each source is a function that yields `Program`; it imports what it needs itself, so that a module
that moved breaks one source. Here are those of helper modules, in `tables` those of test modules.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import compute_precision, full_precision

from . import tables
from .program import FEW, Program, given, rotated

DEVICES = 8
FUZZED = 300
RANDOM = 60


def prepare() -> None:
    """Gives JAX the devices that sharded programs ask for; to be called before it starts."""
    from ..support.xla_flags import set_xla_flags

    set_xla_flags(devices=DEVICES)


# --- packages and models --------------------------------------------------------------------------


def other_packages() -> Iterator[Program]:
    """Models and functions of other packages."""
    from ..third_party.flax_nnx import Applied, nnx_autocast
    from ..third_party.program import Draw
    from ..third_party.tables import PROGRAMS

    def cast_of_calls(applied: Any, **options: Any) -> Any:
        return Applied(applied.graph, applied.call, lambda call: nnx_autocast(call, **options))

    for index, (name, program) in enumerate(PROGRAMS.items()):
        options: dict[str, Any] = {"settings": rotated(index, 3), "derive": program.grad}
        if name.startswith("nnx: "):
            options["cast"] = cast_of_calls
        yield Program(name, lambda p=program, n=name: p.build(Draw(n)), **options)


def benchmark_models() -> Iterator[Program]:
    """The losses of the four models that the benchmarks compare."""
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
    from comparison.cases import SIZES, plain_loss

    def shapes(case: Any) -> tuple[Any, Any]:
        text = len(case.inputs) == 2
        inputs = jax.ShapeDtypeStruct(case.inputs, jnp.int32 if text else jnp.float32)
        labels = jax.ShapeDtypeStruct(case.inputs if text else case.inputs[:1], jnp.int32)
        state = dict(jax.eval_shape(case.build().init, jax.random.key(0), inputs))
        return state.pop("params"), {"inputs": inputs, "labels": labels, "state": state}

    for case in SIZES["tiny"]:
        yield Program(case.name, lambda c=case: (plain_loss(c.build()), shapes(c)))


# --- random programs ------------------------------------------------------------------------------


def fuzzed() -> Iterator[Program]:
    """Programs of the fuzzer; some are made for the mode of 64 bits."""
    from ..fuzz.campaign import make_case
    from ..fuzz.program import jax_settings

    case = functools.lru_cache(maxsize=1)(lambda index: make_case(13, index)[0])
    for index in range(FUZZED):
        build = lambda i=index: (case(i).plain, case(i).args)
        context = lambda i=index: jax_settings(case(i).program.x64)
        settings = rotated(index, 2)
        yield Program(f"program {index}", build, settings=settings, context=context)


# --- one operation at a time ----------------------------------------------------------------------


def contractions() -> Iterator[Program]:
    """Contractions of all kinds, and transformations of the cast ones."""
    from ..support.contractions import TABLE, TRANSFORMS, arguments

    for name, row in TABLE.items():
        yield given(name, row[2], *arguments(row), derive=(0, 1))
    names = itertools.product(("matmul", "batch", "conv2d"), TRANSFORMS)
    # JAX has no batching rule and no second derivative of a ragged one.
    names = [*names, *(("ragged", n) for n in ("jvp", "linearize"))]
    for name, transform in names:
        row, around = TABLE[name], TRANSFORMS[transform]
        total = lambda x, w, f=row[2]: jnp.sum(jnp.sin(f(x, w)))
        fn = row[2] if transform in ("vmap_lhs", "vmap_rhs", "vmap_both") else total
        yield given(f"{transform} {name}", fn, *arguments(row), around=around, settings=FEW)


def conformance() -> Iterator[Program]:
    """PyTorch's ops in each mix of 16-bit and float32 inputs."""
    from ..conformance.rows import CASES, load_rows
    from ..support.jaxprs import through_a_dot

    def of_case(row: Any, case: str) -> Callable[..., Any]:
        first = {"all_bf16": True, "first_bf16_rest_f32": True}.get(case, False)
        rest = {"all_bf16": True, "first_f32_rest_bf16": True}.get(case, False)

        def fn(*xs: Any) -> Any:
            low = [through_a_dot(x) if (rest if i else first) else x for i, x in enumerate(xs)]
            return row.program("bfloat16")(*low)

        return fn

    for row, case in itertools.product(load_rows(), CASES):
        if case == "all_f64" or (len(row.shapes) == 1 and "rest" in case):
            continue
        args = [jax.ShapeDtypeStruct(shape, "float32") for shape in row.shapes]
        options = {"options": {"params": row.params}} if row.params else {}
        yield given(f"{row.op} {case}", of_case(row, case), *args, settings=FEW, **options)


# --- the tools' programs --------------------------------------------------------------------------


def tuned() -> Iterator[Program]:
    """Programs that `tune` is tested with."""
    from ..support.tune_programs import X, big_square, in_cond, in_scan, with_odd_names

    for fn in (big_square, in_scan, in_cond, with_odd_names):
        yield given(fn.__name__, fn, X)


def edges() -> Iterator[Program]:
    """Wrappers in wrappers, scopes, the mode of 64 bits, and what is no float32."""
    from ..support.pickled_functions import Layer, decorated, default_floats, double

    x = np.eye(8, dtype=np.float32)
    yield given("double", double, x)
    yield given("default floats", default_floats, x)
    yield given("default floats of 64 bits", default_floats, x, context=in_64_bits)
    yield given("double of float64", double, x.astype(float), context=in_64_bits)
    yield given("decorated", decorated, x)
    yield given("method", Layer().apply, x)
    yield given("static method", Layer.square, x)
    for scope in (full_precision, lambda: compute_precision("float16"), contextlib.nullcontext):
        within = lambda x, s=scope: jnp.tanh(_inside(s, double, x)) @ x
        name = getattr(scope, "__name__", "")
        yield given(f"scope {name}", within, x)
    products = lambda n: (n @ n, n.astype(jnp.float32) @ n.astype(jnp.float32))
    yield given("integers", products, np.eye(8, dtype=int))
    yield given("complex", lambda x: jnp.abs((x + 1j * x) @ x), x)
    yield given("nothing", lambda x: x, x)


def in_64_bits() -> Any:
    return jax.enable_x64(True)


def _inside(scope: Callable[[], Any], fn: Callable[..., Any], *args: Any) -> Any:
    with scope():
        return fn(*args)


SOURCES: dict[str, Callable[[], Iterator[Program]]] = {
    source.__name__: source
    for source in (
        edges,
        tuned,
        contractions,
        *tables.SOURCES,
        benchmark_models,
        fuzzed,
        conformance,
        other_packages,
    )
}
