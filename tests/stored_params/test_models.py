"""`cast_params` on the models of the benchmarks: same bits, few bytes."""

import pytest

from jmp_autocast import Policy, cast_params
from tests.support.scripts import run_from
from tests.support.stored_models import needless, programs, shaken

# What is stored, over what hand-written inference stores.
CASES = [
    # Rows of an embedding begin the residual stream, which is float32 but at level "compute".
    ("GPT", "bfloat16", "o1", 1.3),
    ("GPT", "float16", "compute", 1.02),
    ("ViT", "float16", "o1", 1.2),
    ("ResNet", "bfloat16", "tensor_cores", 1.02),
    ("LSTM", "float16", "o1", 1.02),
]

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture(scope="module")
def stored_bytes():
    with run_from("benchmarks", module="stored_bytes") as script:
        yield script


@pytest.mark.parametrize(("name", "dtype", "level", "most"), CASES)
def test_models_return_the_same_bits_with_all_that_allows_it_in_16(
    name, dtype, level, most, stored_bytes
):
    program = programs("tiny")[name]
    program = program._replace(params=shaken(program.params))
    policy = Policy(dtype, level=level)
    small = cast_params(program.fn, program.params, *program.args, policy=policy, check=True)
    assert stored_bytes.nbytes(small) <= most * stored_bytes.by_hand(program.params)
    assert list(needless(program, policy)) == []
