"""The location of an instruction: scopes in its name, and a line that is written in two ways."""

import pytest

from jmp_autocast.inspect.compiled.hlo import parse
from jmp_autocast.inspect.compiled.locations import Location, location_of
from tests.support.hlo_texts import TEXTS, instructions_of, module_of

FRAMES = """

FileNames
1 "/models/gpt.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=7 parent_frame_id=1}
"""
PLACES = {
    'op_name="jit(step)/transpose(jvp(head))/dot_general" stack_frame_id=1': Location(
        "head", "dot_general", "/models/gpt.py:12"
    ),
    'op_name="jit(f)/while/body/closed_call/in/tanh" source_file="/m.py" source_line=3': Location(
        "in", "tanh", "/m.py:3"
    ),
    'op_name="jit(f)/jvp(autocast[declared])/vmap(a)/b/add"': Location("a/b", "add", ""),
    'op_name="jit(f)/jvp(a/b)/add" stack_frame_id=2': Location("a/b", "add", ""),
    'scheduling_name="add.1"': Location("", "", ""),
}


@pytest.mark.parametrize("metadata", PLACES)
def test_a_location(metadata):
    line = f"ROOT %x = f32[8]{{0}} parameter(0), metadata={{{metadata}}}"
    module = parse(module_of(line, header=FRAMES))
    assert location_of(module.computations["main"]["x"], module) == PLACES[metadata]


def test_the_metadata_of_a_kernel_is_not_that_of_the_instruction():
    module = parse((TEXTS / "tpu_splash_attention.txt").read_text("utf-8"))
    kernel = next(i for i in instructions_of(module) if i.target == "tpu_custom_call")
    location = location_of(kernel, module)
    assert location.operation == "pallas_call"
    assert location.source.endswith("splash_attention_kernel.py:2427")
