"""`benchmarks/compilers` measures programs by what `inspect.compiled` reads of them.

Bytes of kernels and of collectives are those of small modules whose answer is known.
"""

import jax.numpy as jnp
import pytest

from tests.support.hlo_texts import compiled_text, module_of
from tests.support.scripts import run_from


@pytest.fixture(scope="module", autouse=True)
def compilers():
    with run_from("benchmarks", module="compilers.measure"):
        import compilers

        yield compilers


def test_a_row_adds_up_what_a_text_says(compilers):
    row = compilers.measure.read(compiled_text(lambda x, y: x @ y @ y, (16, 32), (32, 32)))
    assert row.products == {"dot float32 x float32 -> float32": (2, 2 * 2 * 16 * 32 * 32)}
    assert row.flops == 2 * 2 * 16 * 32 * 32
    assert (row.converts, row.convert_kernels, row.wire, row.note) == (0, 0, 0, "")


CONVERTS = """
%only (a: f32[8]) -> bf16[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %c = bf16[8]{0} convert(%a)
}
%also (b: bf16[8]) -> f32[8] {
  %b = bf16[8]{0} parameter(0)
  %d = f32[8]{0} convert(%b)
  ROOT %e = f32[8]{0} exponential(%d)
}
"""


def test_converts_and_kernels_that_only_convert_count(compilers):
    text = module_of(
        "%x = f32[8]{0} parameter(0)",
        "%low = bf16[8]{0} fusion(%x), kind=kLoop, calls=%only",
        "ROOT %y = f32[8]{0} fusion(%low), kind=kLoop, calls=%also",
        before=CONVERTS,
    )
    row = compilers.measure.read(text)
    assert (row.converts, row.convert_kernels) == (2, 1)


def test_the_largest_batch_is_where_the_memory_ends(compilers):
    import compilers.batches

    nbytes = lambda batch: 10 + 3 * batch
    assert compilers.batches.largest(nbytes, 40) == 10
    assert compilers.batches.largest(nbytes, 39.9) == 9
    assert compilers.batches.largest(nbytes, 12) == 0
    # Past the line through the first two: a batch that does not fit is not taken.
    assert compilers.batches.largest(lambda batch: 10 + 3 * batch + 4 * (batch > 8), 40) == 8


# --- bytes that kernels move --------------------------------------------------------------------


def moved(compilers, text):
    return compilers.measure.read(text).traffic


def test_elementwise_reads_and_writes_each_array_once(compilers):
    mega = 2**20
    text = compiled_text(lambda x, y: jnp.tanh(x * y + 1), (mega,), (mega,))
    assert moved(compilers, text) == 3 * 4 * mega


FUSED = """
%fused (a: f32[12,1000], i: s32[]) -> bf16[1000] {
  %a = f32[12,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %low = bf16[12,1000]{1,0} convert(%a)
  %row = bf16[1,1000]{1,0} dynamic-slice(%low, %i, %zero), dynamic_slice_sizes={1,1000}
  ROOT %flat = bf16[1000]{0} bitcast(%row)
}
%update (s: f32[12,1000], u: f32[1,1000], k: s32[]) -> f32[12,1000] {
  %s = f32[12,1000]{1,0} parameter(0)
  %u = f32[1,1000]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %none = s32[] constant(0)
  %twice = f32[1,1000]{1,0} add(%u, %u)
  ROOT %put = f32[12,1000]{1,0} dynamic-update-slice(%s, %twice, %k, %none)
}
"""
ARGUMENTS = (
    "%stack = f32[12,1000]{1,0} parameter(0)",
    "%n = s32[] parameter(1)",
    "%row = f32[1,1000]{1,0} parameter(2)",
    "%near = f32[12,1000]{1,0:S(1)} parameter(3)",
)
KERNELS = {
    # The row in float32, the index, the row in bfloat16.
    "a slice that is converted": (
        "bf16[1000]{0} fusion(%stack, %n), kind=kLoop, calls=%fused",
        4000 + 4 + 2000,
    ),
    "of an array on the chip": (
        "bf16[1000]{0} fusion(%near, %n), kind=kLoop, calls=%fused",
        4 + 2000,
    ),
    "an update in place": (
        "f32[12,1000]{1,0} fusion(%stack, %row, %n), kind=kLoop, calls=%update",
        4000 + 4 + 4000,
    ),
    "dynamic-slice": ("f32[1,1000]{1,0} dynamic-slice(%stack, %n, %n)", 8000),
    "dynamic-update-slice": ("f32[12,1000]{1,0} dynamic-update-slice(%stack, %row, %n, %n)", 8000),
    "copy-start": ("(f32[12,1000]{1,0:S(1)}, f32[12,1000]{1,0}, u32[]) copy-start(%stack)", 48000),
    "bitcast": ("f32[12000]{0} bitcast(%stack)", 0),
    "a library call with scratch memory": (
        '(f32[1,1000]{1,0}, s8[4096]{0}) custom-call(%row), custom_call_target="__cublas$gemm"',
        8000,
    ),
}


@pytest.mark.parametrize(("line", "nbytes"), KERNELS.values(), ids=KERNELS)
def test_bytes_of_a_kernel(line, nbytes, compilers):
    text = module_of(*ARGUMENTS, f"ROOT %out = {line}", before=FUSED)
    assert moved(compilers, text) == nbytes


def test_a_kernel_that_reads_a_line_which_is_not_understood_counts_no_bytes(compilers):
    text = module_of("%x = what is this", "ROOT %y = f32[8]{0} slice(%x), slice={[0:8]}")
    row = compilers.measure.read(text)
    assert (row.traffic, row.kernels, row.note) == (0, 1, "not understood: 2 lines")


# --- bytes that devices send --------------------------------------------------------------------

COLLECTIVES = {
    "all-gather-start": (
        "(bf16[100]{0}, bf16[400]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]",
        3 * 200,
    ),
    "all-reduce": (
        "bf16[100]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        2 * 200 * 3 // 4,
    ),
    "all-reduce, a part of an axis": (
        "bf16[100]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a', 'b':(1)2}",
        2 * 200 * 3 // 4,
    ),
    "all-reduce, all devices": (
        "bf16[100]{0} all-reduce(%x), replica_groups={}, to_apply=%add",
        2 * 200 * 3 // 4,
    ),
    "all-to-all": ("bf16[100]{0} all-to-all(%x), replica_groups={{0,1}}", 100),
    "reduce-scatter": ("bf16[25]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4]", 150),
    "collective-permute": (
        "bf16[100]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
        200,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_that_a_device_sends(name, compilers):
    line, nbytes = COLLECTIVES[name]
    text = module_of(
        "%x = bf16[100]{0} parameter(0)", f"ROOT %y = {line}", header=", num_partitions=4"
    )
    row = compilers.measure.read(text)
    kind = name.partition(",")[0].removesuffix("-start")
    assert row.collectives == {f"{kind} bf16": (1, nbytes)}
    assert row.traffic == 0  # what goes over the wire is no traffic of a kernel
