"""The runs of a compiled program: how often, of which kind, and their estimated cycles."""

import re

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast.inspect.compiled.kernels import cycles_of, kernel_of
from tests.support.hlo_texts import (
    TEXTS,
    compiled_text,
    module_of,
    products_of,
    read,
)


def test_a_loop_multiplies():
    def loop(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=7)[0]

    text = compiled_text(loop, (64, 128), (128, 128))
    assert [run.steps for run in read(text)[1] if run.is_loop] == [7]
    (product,) = products_of(text)
    assert (product.operands, product.times) == (("float32", "float32"), 7)
    assert product.flops == 7 * 2 * 64 * 128 * 128


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
        (0, 8, 2, "%at, %limit", "LT", 4),
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
    _, (loop, *kernels) = read(text)
    assert (loop.is_loop, loop.steps) == (True, count)
    assert [(run.instruction.name, run.times) for run in kernels] == [
        ("next", count or 1),
        ("y", count or 1),
    ]


def test_of_a_conditional_the_branch_counts_that_weighs_most():
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
        assert [run.instruction.name for run in found] == ["n"]


INSIDE = """
%gathers (a: bf16[8]) -> bf16[16] {
  %a = bf16[8]{0} parameter(0)
  ROOT %g = bf16[16]{0} all-gather(%a), dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("bf16[16]{0} fusion(%x), kind=kCustom, calls=%gathers", ["y", "g"]),
        ("bf16[16]{0} call(%x), to_apply=%gathers", ["g"]),
        ("((bf16[8]{0}), bf16[16]{0}) async-start(%x), calls=%gathers", ["g"]),
        ("bf16[16]{0} all-gather-done(%x)", []),
        ("bf16[8]{0} bitcast(%x)", []),
        ('bf16[8]{0} custom-call(), custom_call_target="AllocateBuffer"', []),
    ],
)
def test_what_runs(line, names):
    text = module_of("%x = bf16[8]{0} parameter(0)", f"ROOT %y = {line}", before=INSIDE)
    _, found = read(text)
    assert [run.instruction.name for run in found] == names
    assert [run.is_kernel for run in found] == [name == "y" for name in names]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("f32[8,4]{0,1} copy(%x)", "copy"),
        ("f32[4,8]{1,0} transpose(%x), dimensions={1,0}", "copy"),
        ("(f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]) copy-start(%x)", "other"),
        ("bf16[8,4]{1,0} convert(%x)", "cast"),
        ("f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}", "product"),
        ("f32[8,4]{1,0} negate(%x)", "other"),
        ('f32[8,4]{1,0} custom-call(%x), custom_call_target="mine"', "other"),
    ],
)
def test_kinds(line, kind):
    module, (run,) = read(module_of("%x = f32[8,4]{1,0} parameter(0)", f"ROOT %y = {line}"))
    assert kernel_of(run, module).kind == kind


def test_cycles_are_those_of_the_text_with_loops_multiplied():
    text = (TEXTS / "tpu_scan.txt").read_text("utf-8")
    # Each of the five layers runs in one body of the forward pass and one of the backward pass.
    expected = 0
    for computation in re.findall(r"^(?:ENTRY )?%\S+ \(.*\n(?: .*\n)*", text, re.MULTILINE):
        found = map(int, re.findall(r'"estimated_cycles":"(\d+)"', computation))
        times = 1 if computation.startswith("ENTRY") else 5
        expected += times * sum(cycles for cycles in found if cycles < 2**60)
    assert expected > 200_000
    assert sum(cycles_of(run) or 0 for run in read(text)[1]) == expected


def test_no_estimate_and_its_sentinel_count_nothing():
    config = 'backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'
    for written, cycles in ((7, 7), (2**63 - 1, None)):
        line = f"ROOT %y = f32[8]{{0}} negate(%x), {config.format(written)}"
        _, (run,) = read(module_of("%x = f32[8]{0} parameter(0)", line))
        assert cycles_of(run) == cycles
    _, (copy,) = read(module_of("%x = f32[8]{0} parameter(0)", "ROOT %y = f32[8]{0} copy(%x)"))
    assert cycles_of(copy) is None
