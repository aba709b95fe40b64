"""Kernels of compiled modules that do nothing but convert."""

from jmp_autocast.inspect.compiled.casts import first_convert
from tests.support.hlo_texts import module_of, read


def test_kernels_that_only_convert():
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
    found = {k.instruction.name: first_convert(k, module) for k in found.kernels}
    (convert, dtype) = found["low"]
    assert (convert.name, dtype) == ("c", "f32")
    assert found["y"] is None
