"""The bytes that kernels move, and how often loops run: small modules whose answer is known."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast.inspect.compiled.products import products
from tests.support.hlo_texts import compiled_text, module_of, read

MEGA = 2**20


def test_elementwise_reads_and_writes_each_array_once():
    text = compiled_text(lambda x, y: jnp.tanh(x * y + 1), (MEGA,), (MEGA,))
    _, found = read(text)
    assert found.nbytes == 3 * 4 * MEGA
    assert found.launches == 1


def test_a_loop_multiplies():
    def loop(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=7)[0]

    module, found = read(compiled_text(loop, (64, 128), (128, 128)))
    assert [loop for loop in found.loops if loop.steps is None] == []
    (product,) = products(found, module)
    assert (product.operands, product.times) == (("f32", "f32"), 7)
    assert product.flops == 2 * 64 * 128 * 128
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
def test_bytes_of_a_kernel(line, nbytes):
    text = module_of(*ARGUMENTS, f"ROOT %out = {line}", before=FUSED)
    _, found = read(text)
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
def test_a_tpu_does_not_say_how_often_a_loop_runs(first, limit, step, compared, direction, count):
    parts = {"limit": limit, "step": step, "compared": compared, "direction": direction}
    text = module_of(
        f"%first = s32[] constant({first})",
        "%data = f32[100]{0} parameter(0)",
        "%start = (s32[], f32[100]{0}) tuple(%first, %data)",
        "ROOT %loop = (s32[], f32[100]{0}) while(%start), condition=%condition, body=%body",
        before=LOOP.format(**parts),
    )
    _, found = read(text)
    unknown = [loop.instruction.name for loop in found.loops if loop.steps is None]
    assert unknown == ([] if count else ["loop"])
    # The addition of the counter is a kernel, too: it reads two numbers and writes one.
    assert found.nbytes == (count or 1) * (800 + 12)


def test_of_a_conditional_the_larger_branch_counts():
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
        _, found = read(module_of(*lines, choice, before=branches))
        assert found.nbytes == 800


def test_a_kernel_that_reads_a_line_which_is_not_understood_counts_no_bytes():
    text = module_of("%x = what is this", "ROOT %y = f32[8]{0} slice(%x), slice={[0:8]}")
    module, found = read(text)
    assert module.unread == ("%x = what is this",)
    assert (found.nbytes, found.unread, found.launches) == (0, ("y",), 1)
