"""Runs the rows under autocast: one `Outcome` for each row, case and compute dtype.

Programs are only traced: a dtype is read from the abstract value of the result.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import autocast
from tests.support.jaxprs import through_a_dot

from .differences import NO_RESULT, unrunnable
from .rows import CASES, Row, all_rows, load_rows


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What PyTorch and autocast return for one row and one case."""

    row: Row
    case: str
    want: str
    got: str

    @property
    def agrees(self) -> bool:
        """Whether the dtypes are the same; JAX's default integers have 32 bits, PyTorch's 64."""
        kinds = [np.dtype(jnp.dtype(name)).kind for name in (self.want, self.got)]
        return self.want == self.got or kinds == ["i", "i"]


def outcomes(dtype: str, arguments: bool = False, measured: bool = True) -> tuple[Outcome, ...]:
    """Runs all rows in all cases in which PyTorch returns something.

    With ``arguments`` 16-bit inputs are arguments of the program, not computed by it.
    """
    found = (o for case in CASES for o in outcomes_of(case, dtype, arguments))
    return tuple(o for o in found if not measured or o.row.torch_call)


@functools.cache
def outcomes_of(case: str, dtype: str, arguments: bool = False) -> tuple[Outcome, ...]:
    """The same of one case, with the rows that were not measured."""
    return tuple(_outcomes(case, dtype, arguments, load_rows() if arguments else all_rows()))


def _outcomes(case: str, dtype: str, arguments: bool, rows: tuple[Row, ...]) -> Iterator[Outcome]:
    # Each check for leaks is a garbage collection. PyTorch promotes where strict JAX raises.
    with jax.check_tracer_leaks(False), jax.numpy_dtype_promotion("standard"):
        for row in rows:
            want = row.torch_dtypes.get(case, "ERR")
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


def disagreeing(dtype: str, measured: bool = True) -> dict[str, list[Outcome]]:
    """Returns the outcomes that differ, by the name of the row."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes(dtype, measured=measured):
        if not outcome.agrees:
            found.setdefault(outcome.row.op, []).append(outcome)
    return found


def comparable(dtype: str) -> set[str]:
    """Returns the names of the rows for which PyTorch returns something in some case."""
    return {outcome.row.op for outcome in outcomes(dtype)}


def function_of(
    row: Row,
    case: str,
    dtype: str,
    enter: Callable = through_a_dot,
    beside: Callable = jnp.log,
) -> Callable:
    """Returns the program of a row for one case, as a function of its float inputs.

    ``enter`` makes a 16-bit input of an argument; ``beside`` makes the float32 value that stands
    next to a 16-bit one, if it is no parameter. It is no ``exp``: in float16 a product of one
    without a bound is float32.
    """
    low = _in_16_bits(case, len(row.shapes))
    program = row.program(dtype)

    def prepared(i: int, x: jax.Array) -> jax.Array:
        if low[i]:
            return enter(x)
        return beside(x) if any(low) and i not in row.params else x

    return lambda *xs: program(*(prepared(i, x) for i, x in enumerate(xs)))


def _got(row: Row, case: str, dtype: str, arguments: bool) -> str:
    fn = function_of(row, case, dtype, (lambda x: x) if arguments else through_a_dot)
    low = _in_16_bits(case, len(row.shapes))
    declared = "float64" if case == "all_f64" else "float32"
    with jax.enable_x64(case == "all_f64"):
        args = [
            jax.ShapeDtypeStruct(shape, dtype if arguments and is_low else declared)
            for shape, is_low in zip(row.shapes, low, strict=True)
        ]
        options = {"policy": dtype, "output_dtype": "computed", "params": row.params}
        return jax.eval_shape(autocast(fn, **options), *args).dtype.name


def _in_16_bits(case: str, count: int) -> list[bool]:
    assert case in CASES
    if case in ("all_f32", "all_f64"):
        return [False] * count
    if case == "all_bf16":
        return [True] * count
    first = case == "first_bf16_rest_f32"
    return [first, *(not first,) * (count - 1)]
