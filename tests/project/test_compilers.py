"""`benchmarks/compilers` reads optimized programs as they are: small ones whose answer is known."""

import collections
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
MEGA = 2**20


@pytest.fixture(scope="module", autouse=True)
def compilers():
    """The package, as if run from its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import compilers.counts
        import compilers.measure
        import compilers.traffic

        yield compilers
        for name in [n for n in sys.modules if n.split(".")[0] in ("compilers", "comparison")]:
            del sys.modules[name]


def module_of(*lines, entry, before=""):
    """The text of a module: an entry of these lines, and the computations before it."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule test\n{before}\nENTRY %main ({entry}) -> f32[] {{\n{body}\n}}\n"


def read(compilers, text):
    module = compilers.hlo.parse(text)
    return module, compilers.traffic.traffic(module)


def compiled_text(function, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()


# Parsing.


def test_a_line_with_everything(compilers):
    text = module_of(
        '%p.1 = f32[8,128]{1,0:T(8,128)S(1)} parameter(0), metadata={op_name="a[b](c)="}',
        "ROOT %w = (s32[]{:T(128)}, bf16[2,3]{1,0:T(2,128)(2,1)}, /*index=2*/f8e4m3fn[<=4]{0}) "
        'custom-call(f32[8,128]{1,0} %p.1, %p.1), custom_call_target="x", calls=%inner.2',
        entry="p.1: f32[8,128]",
    )
    found = compilers.hlo.parse(text).computations["main"]
    parameter, root = found["p.1"], found["w"]
    assert (parameter.opcode, parameter.inside, parameter.operands) == ("parameter", "0", ())
    assert (parameter.nbytes, parameter.elements) == (0, 1024)  # it lies on the chip
    assert root.is_root
    assert root.operands == ("p.1", "p.1")
    assert [(s.dtype, s.dims, s.nbytes) for s in root.shapes] == [
        ("s32", (), 4),
        ("bf16", (2, 3), 12),
        ("f8e4m3fn", (4,), 4),
    ]
    assert root.called("calls") == "inner.2"
    assert root.attribute("custom_call_target") == '"x"'
    assert root.attribute("body") is None


# Traffic.


def test_elementwise_reads_and_writes_each_array_once(compilers):
    text = compiled_text(lambda x, y: jnp.tanh(x * y + 1), (MEGA,), (MEGA,))
    _, found = read(compilers, text)
    assert found.nbytes == 3 * 4 * MEGA
    assert found.launches == 1


def test_a_loop_multiplies(compilers):
    def loop(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=7)[0]

    module, found = read(compilers, compiled_text(loop, (64, 128), (128, 128)))
    assert found.unknown_loops == ()
    (product,) = compilers.counts.products(found, module)
    assert product == compilers.counts.Product("dot f32 x f32 -> f32", 7, 2 * 64 * 128 * 128)
    # The dot and the tanh are kernels; copies of the carry and the counter may be others.
    step = 4 * (64 * 128 + 128 * 128 + 64 * 128) + 4 * 2 * 64 * 128
    assert 7 * step <= found.nbytes <= 1.5 * 7 * step


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
    "AllocateBuffer": ('f32[5]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    "a library call with scratch memory": (
        '(f32[1,1000]{1,0}, s8[4096]{0}) custom-call(%row), custom_call_target="__cublas$gemm"',
        8000,
    ),
}


@pytest.mark.parametrize(("line", "nbytes"), KERNELS.values(), ids=KERNELS)
def test_bytes_of_a_kernel(compilers, line, nbytes):
    text = module_of(*ARGUMENTS, f"ROOT %out = {line}", entry="...", before=FUSED)
    _, found = read(compilers, text)
    assert found.nbytes == nbytes


LOOP = """
%condition (c: (s32[], f32[100])) -> pred[] {{
  %c = (s32[], f32[100]{{0}}) parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %limit = s32[]{{:T(128)}} constant({limit})
  ROOT %more = pred[]{{:T(512)}} compare({compared}), direction={direction}
}}
%body (b: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %b = (s32[], f32[100]{{0}}) parameter(0)
  %now = s32[] get-tuple-element(%b), index=0
  %x = f32[100]{{0}} get-tuple-element(%b), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%now, %step)
  %y = f32[100]{{0}} negate(%x)
  ROOT %state = (s32[], f32[100]{{0}}) tuple(%next, %y)
}}
"""


@pytest.mark.parametrize(
    ("first", "limit", "step", "compared", "direction", "count"),
    [
        (0, 12, 1, "%at, %limit", "LT", 12),
        (2, 12, 1, "%at, %limit", "LT", 10),
        (0, 11, 1, "%at, %limit", "LE", 12),
        (11, 0, -1, "%at, %limit", "GE", 12),
        (0, 7, 1, "%limit, %limit", "LT", None),
    ],
)
def test_a_tpu_does_not_say_how_often_a_loop_runs(
    compilers, first, limit, step, compared, direction, count
):
    parts = {"limit": limit, "step": step, "compared": compared, "direction": direction}
    text = module_of(
        f"%first = s32[] constant({first})",
        "%data = f32[100]{0} parameter(0)",
        "%start = (s32[], f32[100]{0}) tuple(%first, %data)",
        "ROOT %loop = (s32[], f32[100]{0}) while(%start), condition=%condition, body=%body",
        entry="...",
        before=LOOP.format(**parts),
    )
    _, found = read(compilers, text)
    assert found.unknown_loops == (() if count else ("loop",))
    # The addition of the counter is a kernel, too: it reads two numbers and writes one.
    assert found.nbytes == (count or 1) * (800 + 12)


def test_of_a_conditional_the_larger_branch_counts(compilers):
    branches = """
%idle (a: f32[100]) -> f32[100] {
  ROOT %a = f32[100]{0} parameter(0)
}
%busy (b: f32[100]) -> f32[100] {
  %b = f32[100]{0} parameter(0)
  ROOT %n = f32[100]{0} negate(%b)
}
"""
    lines = "%x = f32[100]{0} parameter(0)", "%p = pred[] parameter(1)"
    for names in (
        "true_computation=%busy, false_computation=%idle",
        "branch_computations={%idle, %busy}",
    ):
        choice = f"ROOT %out = f32[100]{{0}} conditional(%p, %x, %x), {names}"
        _, found = read(compilers, module_of(*lines, choice, entry="...", before=branches))
        assert found.nbytes == 800


# Products and converts.


def test_a_batched_dot_of_a_tpu_is_a_convolution_with_dilated_batches(compilers):
    text = module_of(
        "%q = bf16[8,1024,12,64]{3,2,1,0} parameter(0)",
        "%k = bf16[8,1024,12,64]{3,2,1,0} parameter(1)",
        "ROOT %s = bf16[8,12,1024,1024]{3,2,1,0} convolution(%q, %k), "
        "window={size=8x12 stride=7x11 lhs_dilate=8x12}, dim_labels=0b1f_0o1i->01bf",
        entry="...",
    )
    module, found = read(compilers, text)
    (product,) = compilers.counts.products(found, module)
    assert product.flops == 2 * 8 * 12 * 1024 * 1024 * 64
    assert product.kind == "convolution bf16 x bf16 -> bf16"


def test_a_matmul_of_cublas_says_its_dimensions(compilers):
    text = module_of(
        "%a = f16[32,64]{1,0} parameter(0)",
        "%b = f16[64,16]{1,0} parameter(1)",
        "ROOT %c = (f32[32,16]{1,0}, s8[33554432]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        entry="...",
    )
    module, found = read(compilers, text)
    (product,) = compilers.counts.products(found, module)
    assert product.kind == "__cublas$lt$matmul f16 x f16 -> f32"
    assert product.flops == 2 * 32 * 16 * 64


def test_a_convolution_of_cudnn_backwards_does_the_products_of_the_forward_one(compilers):
    text = module_of(
        "%a = f16[8,16,16,32]{3,2,1,0} parameter(0)",
        "%b = f16[3,3,4,32]{3,2,1,0} parameter(1)",
        "ROOT %c = (f16[8,16,16,4]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, "
        'custom_call_target="__cudnn$convBackwardInput"',
        entry="...",
    )
    module, found = read(compilers, text)
    (product,) = compilers.counts.products(found, module)
    assert product.flops == 2 * math.prod((8, 16, 16, 32)) * 3 * 3 * 4


def test_converts_by_dtype_and_kernels_that_only_convert(compilers):
    converting = """
%only (a: f32[100]) -> bf16[100] {
  %a = f32[100]{0} parameter(0)
  ROOT %c = bf16[100]{0} convert(%a)
}
%also (b: bf16[100]) -> f32[100] {
  %b = bf16[100]{0} parameter(0)
  %d = f32[100]{0} convert(%b)
  ROOT %e = f32[100]{0} exponential(%d)
}
"""
    text = module_of(
        "%x = f32[100]{0} parameter(0)",
        "%low = bf16[100]{0} fusion(%x), kind=kLoop, calls=%only",
        "ROOT %y = f32[100]{0} fusion(%low), kind=kLoop, calls=%also",
        entry="...",
        before=converting,
    )
    module, found = read(compilers, text)
    assert compilers.counts.converts(module) == collections.Counter(
        {"f32 -> bf16": 1, "bf16 -> f32": 1}
    )
    (kernel,) = compilers.counts.convert_kernels(found, module)
    assert kernel.instruction.name == "low"


# Collectives.


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
    "reduce-scatter": ("bf16[25]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4]", 150),
    "collective-permute": (
        "bf16[100]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
        200,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_that_a_device_sends(compilers, name):
    line, nbytes = COLLECTIVES[name]
    text = module_of("%x = bf16[100]{0} parameter(0)", f"ROOT %y = {line}", entry="...")
    _, found = read(compilers, text)
    (collective,) = compilers.counts.collectives(found)
    kind = name.partition(",")[0].removesuffix("-start")
    assert collective == compilers.counts.Collective(f"{kind} bf16", 1, nbytes)
    assert found.nbytes == 0  # what goes over the wire is no traffic of a kernel


# Programs and commands.


def test_the_largest_batch_is_where_the_memory_ends(compilers):
    import compilers.batches

    nbytes = lambda batch: 10 + 3 * batch
    assert compilers.batches.largest(nbytes, 40) == 10
    assert compilers.batches.largest(nbytes, 39.9) == 9
    assert compilers.batches.largest(nbytes, 12) == 0
    # Past the line through the first two: a batch that does not fit is not taken.
    assert compilers.batches.largest(lambda batch: 10 + 3 * batch + 4 * (batch > 8), 40) == 8
