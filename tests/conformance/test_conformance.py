"""PyTorch's CUDA autocast, row by row: the dtypes agree, or the difference has a reason."""

import importlib.util
import pathlib

import jax
import pytest

from tests.support.torch_ops import DTYPES, arrays, computed

from .differences import DIFFERENCES, NO_RESULT, REASONS, UNMEASURED
from .rows import all_rows, load_rows
from .runner import comparable, disagreeing, function_of, outcomes

# PyTorch promotes where strict JAX raises.
pytestmark = pytest.mark.usefixtures("as_users_run_it")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tools" / "generate_torch_differences.py"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype):
    """At least 95 % of the cases agree; the other rows are those with a reason.

    Of the rows 93.5 % agree in all their cases, and 95.2 % without the four that differ because
    PyTorch's answer rounds a weight (`addmm`) or depends on `vmap` (`vecdot`).
    """
    found = disagreeing(dtype)
    assert set(found) == set(DIFFERENCES)
    cases = outcomes(dtype)
    assert sum(outcome.agrees for outcome in cases) >= 0.95 * len(cases)
    decided = {op for op, reason in DIFFERENCES.items() if reason in ("sum", "vector")}
    agreeing = comparable(dtype) - set(found) | decided
    assert len(agreeing) >= 0.95 * len(comparable(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_in_16_bits(dtype):
    """Fewer agree: the casts that jnp writes for such arguments are the program's own."""
    found = outcomes(dtype, arguments=True)
    assert len(found) > 180
    # A sum of 16-bit elements says nothing of the dtype that the user gave it.
    known = {"sum(dtype=low)", "softmax(dtype=low)"}
    for outcome in found:
        if not outcome.agrees and outcome.row.op not in known:
            assert outcome.got == plain_dtype(outcome.row, dtype) == dtype, outcome


def plain_dtype(row, dtype):
    """What the program returns of 16-bit arguments without autocast."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in row.shapes]
    return jax.eval_shape(row.program(dtype), *args).dtype.name


@pytest.mark.parametrize("case", ["first_f32_rest_bf16", "first_bf16_rest_f32"])
def test_float32_arguments_vote_as_computed_values_do(case):
    """Those that are as large as the result."""
    rows = [row for row in all_rows() if row.torch_dtypes.get(case) == "float32"]
    rows = [row for row in rows if row.op not in {*DIFFERENCES, "outer", "kron"}]
    rows = [row for row in rows if len(set(row.shapes)) == 1]
    assert len(rows) > 25
    for row in rows:
        fn = function_of(row, case, "bfloat16", beside=lambda x: x)
        found = jax.eval_shape(computed(fn, params=row.params), *arrays(row.shapes))
        assert found.dtype == "float32", row.op


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_not_measured(dtype):
    assert set(disagreeing(dtype, measured=False)) == {*DIFFERENCES, *UNMEASURED}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_accounted_for(dtype):
    names = [row.op for row in load_rows()]
    assert len(names) == len(set(names)) == 233
    assert comparable(dtype) | set(NO_RESULT) == set(names)
    assert not comparable(dtype) & set(NO_RESULT)


def test_every_reason_is_used():
    assert {*DIFFERENCES.values(), *UNMEASURED.values()} == set(REASONS)


def test_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_torch_differences", PAGE)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.main(["--check"]) == 0, "run python docs/tools/generate_torch_differences.py"
