"""The text of a compiled module is parsed, with any text in its metadata."""

import pytest

from jmp_autocast.inspect.compiled.hlo import UnreadableError, bits_of, parse
from tests.support.hlo_texts import TEXTS, instructions_of, module_of


def test_a_line_with_everything():
    text = module_of(
        '%p.1 = f32[8,128]{1,0:T(8,128)S(1)} parameter(0), metadata={op_name="a[b](c)="}',
        "ROOT %w = (s32[]{:T(128)}, bf16[2,3]{1,0:T(2,128)(2,1)}, /*index=2*/f8e4m3fn[<=4]{0}) "
        'custom-call(f32[8,128]{1,0} %p.1, %p.1), custom_call_target="x", calls=%inner.2',
        entry="p.1: f32[8,128]",
    )
    found = parse(text).computations["main"]
    parameter, root = found["p.1"], found["w"]
    assert (parameter.opcode, parameter.inside, parameter.operands) == ("parameter", "0", ())
    assert parameter.nbytes == 0  # it lies on the chip
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


def test_metadata_with_line_breaks_belongs_to_its_instruction():
    module = parse((TEXTS / "tpu_splash_attention.txt").read_text("utf-8"))
    kernels = [i for i in instructions_of(module) if i.target == "tpu_custom_call"]
    assert [len(i.operands) for i in kernels] == [6, 9]
    assert not module.unread


def test_operands_may_be_written_without_a_sign_and_with_types():
    text = module_of("x.1 = f32[8]{0} parameter(0)", "ROOT y = f32[8]{0} add(f32[8]{0} x.1, x.1)")
    assert parse(text).computations["main"]["y"].operands == ("x.1", "x.1")


def test_a_line_that_never_ends_is_not_understood_and_takes_no_other_one_with_it():
    text = module_of("%x = f32[8]{0} tanh(%a, metadata={", "ROOT %y = f32[8]{0} parameter(0)")
    module = parse(text)
    assert module.unread == ("%x = f32[8]{0} tanh(%a, metadata={",)
    assert list(module.computations["main"]) == ["y"]


def test_an_unknown_dtype_counts_as_not_understood():
    module = parse(module_of("%x = what[8]{0} parameter(0)", "ROOT %y = f32[8]{0} parameter(1)"))
    assert module.unread == ("%x = what[8]{0} parameter(0)",)
    with pytest.raises(ValueError, match="what is no dtype"):
        bits_of("what")


def test_a_part_of_a_module_says_that_it_is_one():
    text = module_of("ROOT %y = f32[8]{0} fusion(), kind=kLoop, calls=%gone")
    module = parse(text)
    with pytest.raises(UnreadableError, match="y calls gone, which the text does not have"):
        module.body(module.computations["main"]["y"], "calls")
