"""Products of compiled modules: their FLOPs, dtypes, kernels and sums."""

import math

import pytest

from tests.support.hlo_texts import TEXTS, module_of, products_of

CUBLAS = (
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"precision_config":'
    '{"operand_precision":["DEFAULT","HIGHEST"]}}'
)
# Operands, the product, its kind and dtypes, FLOPs, kernel and precision.
PRODUCTS = {
    "a batched dot of a TPU is a convolution with dilated batches": (
        ("bf16[8,1024,12,64]", "bf16[8,1024,12,64]"),
        "bf16[8,12,1024,1024]{3,2,1,0} convolution(%a, %b), window={size=8x12 stride=7x11 "
        'lhs_dilate=8x12}, dim_labels=0b1f_0o1i->01bf, metadata={op_name="jit(f)/dot_general"}',
        ("dot", "bfloat16 bfloat16 bfloat16"),
        2 * 8 * 12 * 1024 * 1024 * 64,
        ("", ""),
    ),
    "a matmul of cuBLASLt says its dimensions": (
        ("f16[32,64]", "f16[64,16]"),
        "(f32[32,16]{1,0}, s8[33554432]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", '
        f'backend_config={{"gemm_backend_config":{CUBLAS}}}',
        ("dot", "float16 float16 float32"),
        2 * 32 * 16 * 64,
        ("cublas", "highest"),
    ),
    "a convolution of cuDNN backwards does the products of the forward one": (
        ("f16[8,16,16,32]", "f16[3,3,4,32]"),
        "(f16[8,16,16,4]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, "
        'custom_call_target="__cudnn$convBackwardInput"',
        ("convolution", "float16 float16 float16"),
        2 * math.prod((8, 16, 16, 32)) * 3 * 3 * 4,
        ("cudnn", ""),
    ),
    "oneDNN": (
        ("bf16[4,32,64]", "bf16[4,64,16]"),
        "(bf16[4,32,16]{2,1,0}, u8[64]{0}) custom-call(%a, %b), "
        'custom_call_target="__onednn$matmul"',
        ("dot", "bfloat16 bfloat16 bfloat16"),
        2 * 4 * 32 * 16 * 64,
        ("onednn", ""),
    ),
    "a convolution whose filter is not said": (
        ("bf16[4,16,16,32]", "bf16[3,3,32,8]"),
        'bf16[4,16,16,8]{3,2,1,0} custom-call(%a, %b), custom_call_target="__onednn$convolution"',
        ("convolution", "bfloat16 bfloat16 bfloat16"),
        None,
        ("onednn", ""),
    ),
    "a dot algorithm": (
        ("f32[8,4]", "f32[4,2]"),
        "f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        "algorithm=dot_bf16_bf16_f32_x3",
        ("dot", "float32 float32 float32"),
        128,
        ("", "dot_bf16_bf16_f32_x3"),
    ),
}


@pytest.mark.parametrize("row", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product(row):
    operands, line, (kind, dtypes), flops, (kernel, precision) = row
    a, b = (f"{shape} parameter({i})" for i, shape in enumerate(operands))
    (product,) = products_of(module_of(f"%a = {a}", f"%b = {b}", f"ROOT %c = {line}"))
    assert (product.kind, " ".join((*product.operands, product.result))) == (kind, dtypes)
    assert product.flops == flops
    assert (product.kernel, product.precision) == (kernel, precision)


def test_a_product_of_a_line_that_is_not_understood_has_no_dtype_and_no_flops():
    text = module_of(
        "%a = what is this",
        "%b = f32[4,2]{1,0} parameter(0)",
        "ROOT %c = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    (product,) = products_of(text)
    assert (product.operands, product.flops) == (("", "float32"), None)


@pytest.mark.parametrize(
    ("name", "kernel", "expected"),
    [
        ("gpu_cublas", "cublas", [2 * 4096**3]),
        ("gpu_cudnn", "cudnn", [2 * 8 * 32 * 32 * 64 * 64 * 9] * 3),
    ],
)
def test_what_the_gpu_compiler_calls(name, kernel, expected):
    calls = products_of((TEXTS / f"{name}.txt").read_text("utf-8"))
    assert [p.flops for p in calls] == expected
    assert {(*p.operands, p.result, p.kernel) for p in calls} == {("bfloat16",) * 3 + (kernel,)}


@pytest.mark.parametrize(
    ("result", "platform", "sums"),
    [
        ("bf16", "cpu", "bfloat16"),
        ("f32", "cpu", "float32"),
        ("bf16", "tpu", "float32"),
        ("bf16", "gpu", "float32"),
        ("bf16", "", ""),
    ],
)
def test_the_dtype_that_sums_have(result, platform, sums):
    line = f"{result}[8,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}"
    text = module_of(*(f"%{n} = bf16[8,8] parameter(0)" for n in "ab"), f"ROOT %c = {line}")
    assert [product.sums for product in products_of(text, platform)] == [sums]


INSIDE = """
%inside (p: bf16[8,8], q: bf16[8,2]) -> bf16[8,2] {
  %p = bf16[8,8] parameter(0)
  %q = bf16[8,2] parameter(1)
  ROOT %d = bf16[8,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}
}
"""


def test_a_kernel_of_a_library_adds_up_in_float32():
    text = module_of(
        "%a = bf16[8,8] parameter(0)",
        "%b = bf16[8,2] parameter(1)",
        "ROOT %c = bf16[8,2]{1,0} fusion(%a, %b), kind=kCustom, calls=%inside, "
        'backend_config={"kind":"__ynn_fusion"}',
        before=INSIDE,
    )
    (product,) = products_of(text, "cpu")
    assert (product.kernel, product.sums) == ("ynn", "float32")
