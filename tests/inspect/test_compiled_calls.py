"""Kernels whose inside is not in the text: what is known of them, and that nothing else is said."""

import pytest

from jmp_autocast.inspect.compiled.calls import calls
from tests.support.hlo_texts import TEXTS, module_of, read


def test_a_splash_kernel_runs_in_float32():
    module, found = read((TEXTS / "tpu_splash_attention.txt").read_text("utf-8"))
    forward, backward = calls(found, module)
    assert (forward.name, backward.name) == (
        "splash_mha_fwd_residuals",
        "splash_mha_dq_no_residuals",
    )
    assert {dtype for dtype in forward.operands if dtype[0] == "f"} == {"float32"}
    assert set(forward.results) == set(backward.results) == {"float32"}
    assert forward.flops is None


CALLS = {
    "tpu_custom_call": (
        'backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"4096",'
        '"transcendentals":"0"},"kernel_name":"mine"}}',
        ("mine", 4096),
    ),
    "__gpu$xla.gpu.triton": (
        'backend_config={name = "add_kernel", num_stages = 3 : i32}',
        ("add_kernel", None),
    ),
    "TopK": ("", ("", None)),
}


@pytest.mark.parametrize("target", CALLS)
def test_a_call(target):
    config, expected = CALLS[target]
    line = f'ROOT %y = f32[8]{{0}} custom-call(%x), custom_call_target="{target}", {config}'
    module, found = read(module_of("%x = bf16[8]{0} parameter(0)", line))
    (call,) = calls(found, module)
    assert (call.target, call.operands, call.results, call.nbytes) == (
        target,
        ("bfloat16",),
        ("float32",),
        48,
    )
    assert (call.name, call.flops) == expected
