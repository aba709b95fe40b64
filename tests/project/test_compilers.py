"""`benchmarks/compilers` measures programs by what `inspect.compiled` reads of them."""

import pytest

from tests.support.hlo_texts import TEXTS, compiled_text, module_of, text_that_converts
from tests.support.scripts import run_from


@pytest.fixture(scope="module", autouse=True)
def compilers():
    with run_from("benchmarks", module="compilers.measure"):
        import compilers

        yield compilers


def test_a_row_adds_up_what_a_text_says(compilers):
    row = compilers.measure.read(compiled_text(lambda x, y: x @ y @ y, (16, 32), (32, 32)))
    assert row.products == {"dot f32 x f32 -> f32": (2, 2 * 2 * 16 * 32 * 32)}
    assert row.flops == 2 * 2 * 16 * 32 * 32
    assert (row.converts, row.convert_kernels, row.wire, row.note) == (0, 0, 0, "")


def test_converts_and_kernels_that_only_convert_count(compilers):
    row = compilers.measure.read(text_that_converts())
    assert (row.converts, row.convert_kernels) == (2, 1)


def test_a_kernel_whose_metadata_has_line_breaks(compilers):
    row = compilers.measure.read((TEXTS / "tpu_splash_attention.txt").read_text("utf-8"))
    assert row.traffic > 3e6
    assert row.note == ""


def test_what_is_not_understood_is_noted(compilers):
    text = module_of(
        "%x = f32[8]{0} parameter(0)", "%y = what is this", "ROOT %z = f32[8]{0} tanh(%x)"
    )
    assert compilers.measure.read(text).note == "not understood: 1 lines"


def test_the_largest_batch_is_where_the_memory_ends(compilers):
    import compilers.batches

    nbytes = lambda batch: 10 + 3 * batch
    assert compilers.batches.largest(nbytes, 40) == 10
    assert compilers.batches.largest(nbytes, 39.9) == 9
    assert compilers.batches.largest(nbytes, 12) == 0
    # Past the line through the first two: a batch that does not fit is not taken.
    assert compilers.batches.largest(lambda batch: 10 + 3 * batch + 4 * (batch > 8), 40) == 8
