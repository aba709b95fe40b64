"""Converts of compiled modules, and kernels that do nothing else."""

import collections

from jmp_autocast.inspect.compiled.casts import convert_kernels, converts
from tests.support.hlo_texts import module_of, read


def test_converts_by_dtype_and_kernels_that_only_convert():
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
        before=converting,
    )
    module, found = read(text)
    assert converts(module) == collections.Counter({"f32 -> bf16": 1, "bf16 -> f32": 1})
    (kernel,) = convert_kernels(found, module)
    assert kernel.instruction.name == "low"
