"""Kernels of compiled modules that do nothing but convert."""

from jmp_autocast.inspect.compiled.traffic import first_convert
from tests.support.hlo_texts import read, text_that_converts


def test_kernels_that_only_convert():
    module, found = read(text_that_converts())
    found = {k.instruction.name: first_convert(k, module) for k in found.kernels}
    (convert, dtype) = found["low"]
    assert (convert.name, dtype) == ("c", "f32")
    assert found["y"] is None
