"""Runs the rows under autocast: one `Outcome` for each row, case and compute dtype.

Programs are only traced: a dtype is read from the abstract value of the result.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import autocast
from tests.support.jaxprs import through_a_dot

from .differences import NO_RESULT, unrunnable
from .rows import CASES, Row, load_rows


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What PyTorch and autocast return for one row and one case.

    Args:
        row: The row.
        case: A key of `CASES`.
        want: PyTorch's dtype.
        got: The dtype under autocast.
    """

    row: Row
    case: str
    want: str
    got: str

    @property
    def agrees(self) -> bool:
        """Whether the dtypes are the same; JAX's default integers have 32 bits, PyTorch's 64."""
        kinds = [np.dtype(jnp.dtype(name)).kind for name in (self.want, self.got)]
        return self.want == self.got or kinds == ["i", "i"]


@functools.cache
def outcomes(dtype: str, arguments: bool = False) -> tuple[Outcome, ...]:
    """Runs all rows in all cases in which PyTorch returns something.

    Args:
        dtype: The compute dtype.
        arguments: The 16-bit inputs are arguments of the program, not computed by it.
    """
    return tuple(_outcomes(dtype, arguments))


def _outcomes(dtype: str, arguments: bool) -> Iterator[Outcome]:
    # Each check for leaks is a garbage collection. PyTorch promotes where strict JAX raises.
    with jax.check_tracer_leaks(False), jax.numpy_dtype_promotion("standard"):
        for row in load_rows():
            for case, want in row.torch_dtypes.items():
                if want.startswith("ERR") or unrunnable(row.op, case, dtype):
                    continue
                if row.op in NO_RESULT or (arguments and case != "all_bf16"):
                    continue
                want = dtype if want == "bfloat16" else want
                try:
                    yield Outcome(row, case, want, _got(row, case, dtype, arguments))
                except TypeError:  # linear algebra of 16-bit arguments, in some versions of JAX
                    if not arguments:
                        raise


def disagreeing(dtype: str) -> dict[str, list[Outcome]]:
    """Returns the outcomes that differ, by the name of the row."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes(dtype):
        if not outcome.agrees:
            found.setdefault(outcome.row.op, []).append(outcome)
    return found


def comparable(dtype: str) -> set[str]:
    """Returns the names of the rows for which PyTorch returns something in some case."""
    return {outcome.row.op for outcome in outcomes(dtype)}


def _got(row: Row, case: str, dtype: str, arguments: bool) -> str:
    low = _in_16_bits(case, len(row.shapes))
    program = row.program(dtype)

    def prepared(i: int, x: jax.Array) -> jax.Array:
        if low[i]:
            return x if arguments else through_a_dot(x)
        # Next to a 16-bit value stands a float32 value of the program, or a parameter.
        return jnp.exp(x) if any(low) and i not in row.params else x

    def fn(*xs: jax.Array) -> jax.Array:
        return program(*(prepared(i, x) for i, x in enumerate(xs)))

    declared = "float64" if case == "all_f64" else "float32"
    with jax.enable_x64(case == "all_f64"):
        args = [
            jax.ShapeDtypeStruct(shape, dtype if arguments and is_low else declared)
            for shape, is_low in zip(row.shapes, low, strict=True)
        ]
        options = {"compute_dtype": dtype, "output_dtype": "computed", "params": row.params}
        return jax.eval_shape(autocast(fn, **options), *args).dtype.name


def _in_16_bits(case: str, count: int) -> list[bool]:
    assert case in CASES
    if case in ("all_f32", "all_f64"):
        return [False] * count
    if case == "all_bf16":
        return [True] * count
    first = case == "first_bf16_rest_f32"
    return [first, *(not first,) * (count - 1)]
