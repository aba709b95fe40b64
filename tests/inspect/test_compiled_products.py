"""Products of compiled modules: their FLOPs, dtypes, kernels and sums."""

import math

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast.inspect.compiled.products import sums_of
from tests.support.hlo_texts import TEXTS, compiled_text, module_of, products_of

CUBLAS = (
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"precision_config":'
    '{"operand_precision":["DEFAULT","HIGHEST"]}}'
)
# Operands, the product, its name and dtypes, FLOPs, kernel, precision, whether it is a convolution.
PRODUCTS = {
    "a batched dot of a TPU is a convolution with dilated batches": (
        ("bf16[8,1024,12,64]", "bf16[8,1024,12,64]"),
        "bf16[8,12,1024,1024]{3,2,1,0} convolution(%a, %b), window={size=8x12 stride=7x11 "
        'lhs_dilate=8x12}, dim_labels=0b1f_0o1i->01bf, metadata={op_name="jit(f)/dot_general"}',
        ("convolution", "bf16 bf16 bf16"),
        2 * 8 * 12 * 1024 * 1024 * 64,
        ("", ""),
        False,
    ),
    "a matmul of cuBLASLt says its dimensions": (
        ("f16[32,64]", "f16[64,16]"),
        "(f32[32,16]{1,0}, s8[33554432]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", '
        f'backend_config={{"gemm_backend_config":{CUBLAS}}}',
        ("__cublas$lt$matmul", "f16 f16 f32"),
        2 * 32 * 16 * 64,
        ("cublas", "highest"),
        False,
    ),
    "in 8 bits": (
        ("f8e4m3fn[32,64]", "f8e4m3fn[64,16]"),
        'f32[32,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", '
        f'backend_config={{"gemm_backend_config":{CUBLAS}}}',
        ("__cublas$lt$matmul$f8", "f8e4m3fn f8e4m3fn f32"),
        2 * 32 * 16 * 64,
        ("cublas", "highest"),
        False,
    ),
    "a convolution of cuDNN backwards does the products of the forward one": (
        ("f16[8,16,16,32]", "f16[3,3,4,32]"),
        "(f16[8,16,16,4]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, "
        'custom_call_target="__cudnn$convBackwardInput"',
        ("__cudnn$convBackwardInput", "f16 f16 f16"),
        2 * math.prod((8, 16, 16, 32)) * 3 * 3 * 4,
        ("cudnn", ""),
        True,
    ),
    "oneDNN": (
        ("bf16[4,32,64]", "bf16[4,64,16]"),
        "(bf16[4,32,16]{2,1,0}, u8[64]{0}) custom-call(%a, %b), "
        'custom_call_target="__onednn$matmul"',
        ("__onednn$matmul", "bf16 bf16 bf16"),
        2 * 4 * 32 * 16 * 64,
        ("onednn", ""),
        False,
    ),
    "oneDNN, a convolution": (
        ("bf16[4,16,16,32]", "bf16[3,3,32,8]"),
        "(bf16[4,16,16,8]{3,2,1,0}, u8[64]{0}) custom-call(%a, %b), "
        'custom_call_target="__onednn$convolution", backend_config={"onednn_conv_config":'
        '{"kernel":{"filter":{"output_feature_dim":"3","shape":["3","3","32","8"]}}}}',
        ("__onednn$convolution", "bf16 bf16 bf16"),
        2 * 4 * 16 * 16 * 8 * 3 * 3 * 32,
        ("onednn", ""),
        True,
    ),
    "a convolution whose filter is not said": (
        ("bf16[4,16,16,32]", "bf16[3,3,32,8]"),
        'bf16[4,16,16,8]{3,2,1,0} custom-call(%a, %b), custom_call_target="__onednn$convolution"',
        ("__onednn$convolution", "bf16 bf16 bf16"),
        None,
        ("onednn", ""),
        True,
    ),
    "a dot algorithm": (
        ("f32[8,4]", "f32[4,2]"),
        "f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        "algorithm=dot_bf16_bf16_f32_x3",
        ("dot", "f32 f32 f32"),
        128,
        ("", "dot_bf16_bf16_f32_x3"),
        False,
    ),
    "a precision": (
        ("f32[8,4]", "f32[4,2]"),
        "f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        "operand_precision={highest,highest}",
        ("dot", "f32 f32 f32"),
        128,
        ("", "highest"),
        False,
    ),
    "a ragged dot without dimensions": (
        ("f32[8,4]", "f32[2,4,2]"),
        "f32[8,2]{1,0} ragged-dot(%a, %b)",
        ("ragged-dot", "f32 f32 f32"),
        None,
        ("", ""),
        False,
    ),
}


@pytest.mark.parametrize("row", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product(row):
    operands, line, (name, dtypes), flops, (kernel, precision), is_convolution = row
    a, b = (f"{shape} parameter({i})" for i, shape in enumerate(operands))
    (product,) = products_of(module_of(f"%a = {a}", f"%b = {b}", f"ROOT %c = {line}"))
    assert (product.name, " ".join((*product.operands, product.result))) == (name, dtypes)
    assert product.flops == flops
    assert (product.kernel, product.precision) == (kernel, precision)
    assert product.is_convolution == is_convolution


def test_a_product_of_a_line_that_is_not_understood_has_no_dtype_and_no_flops():
    text = module_of(
        "%a = what is this",
        "%b = f32[4,2]{1,0} parameter(0)",
        "ROOT %c = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    (product,) = products_of(text)
    assert (product.operands, product.flops) == (("", "f32"), None)


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
    assert {(p.operands, p.result, p.kernel) for p in calls} == {(("bf16", "bf16"), "bf16", kernel)}


def of(result, kernel=""):
    line = f"{result}[8,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}"
    text = module_of(*(f"%{n} = bf16[8,8] parameter(0)" for n in "ab"), f"ROOT %c = {line}")
    return products_of(text)[0]._replace(kernel=kernel)


@pytest.mark.parametrize(
    ("product", "platform", "dtype"),
    [
        (of("bf16"), "cpu", "bf16"),
        (of("bf16", "ynn"), "cpu", "f32"),
        (of("f32"), "cpu", "f32"),
        (of("bf16"), "tpu", "f32"),
        (of("bf16", "cublas"), "gpu", "f32"),
        (of("bf16"), "", ""),
    ],
)
def test_the_dtype_that_sums_have(product, platform, dtype):
    assert sums_of(product, platform) == dtype


def test_a_naked_product_of_a_cpu_loses_what_its_sums_say():
    """The reason for `sums`: in JAX 0.12's own code 4,096 ones add up to 3,328 in bfloat16."""
    fn = lambda a, b: (a @ b).T  # no kernel has this form
    found = products_of(compiled_text(fn, (64, 4096), (4096, 64), dtype=jnp.bfloat16))
    narrow = any(sums_of(product, "cpu") == "bf16" for product in found)
    ones = jnp.ones((64, 4096), jnp.bfloat16)
    assert bool(jnp.all(jax.jit(fn)(ones, ones.T) == 4096)) is not narrow
