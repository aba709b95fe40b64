"""PyTorch's CUDA autocast, row by row: the dtypes agree, or the difference has a reason."""

import importlib.util
import pathlib

import pytest

from tests.support.torch_ops import DTYPES

from .differences import DIFFERENCES, NO_RESULT, REASONS
from .rows import load_rows
from .runner import comparable, disagreeing, outcomes

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "generate_torch_differences.py"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype):
    """At least 95 % of the rows agree in all their cases; the others are those with a reason."""
    found = disagreeing(dtype)
    assert set(found) == set(DIFFERENCES)
    agreeing = comparable(dtype) - set(found)
    assert len(agreeing) >= 0.95 * len(comparable(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_in_16_bits(dtype):
    """Fewer agree: the casts that jnp writes for such arguments are the program's own."""
    found = outcomes(dtype, arguments=True)
    assert len(found) > 180
    assert sum(o.agrees for o in found) > 0.75 * len(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_accounted_for(dtype):
    names = [row.op for row in load_rows()]
    assert len(names) == len(set(names)) == 233
    assert comparable(dtype) | set(NO_RESULT) == set(names)
    assert not comparable(dtype) & set(NO_RESULT)


def test_every_reason_is_used():
    assert set(DIFFERENCES.values()) == set(REASONS)


def test_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_torch_differences", PAGE)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.main(["--check"]) == 0, "run python docs/generate_torch_differences.py"
