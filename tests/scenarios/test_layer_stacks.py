"""A loop over stacked parameters plans a layer as the middle of a written-out model does."""

import pytest

from .layer_stacks import BLOCKS, LEVELS, WRAPPERS, Stack, wrongly_kept

# Each block, each level and wrapper with some of them.
STACKS = [
    *[Stack(block, "product") for block in BLOCKS],
    *[Stack(block, "table") for block in ("two sums", "highway", "post-norm")],
    *[Stack("two sums", "product", wrapper) for wrapper in WRAPPERS if wrapper != "plain"],
    *[Stack("scaled branch", "product", "checkpoint", level) for level in LEVELS],
    Stack("parallel", "product", "jit", "compute"),
    Stack("one sum", "product", "checkpoint", "o1", "float16"),
]


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_a_scanned_layer_has_the_dtypes_of_the_middle_ones(stack, jit_caches):
    compared = stack.compared()
    assert not compared.scanned, "\n".join(compared.scanned)
    # A layer differs at the ends alone.
    assert compared.unrolled.keys() <= {"layer 0", "layer 5"}, compared.unrolled


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_and_a_call_change_nothing_that_a_vit_keeps(level, as_users_run_it):
    assert not wrongly_kept(level, layers=2)
