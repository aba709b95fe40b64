"""The products (matmuls and convolutions) of a compiled program: dtypes, kernels and FLOPs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from ...interpreters.primitives.flops import pairs_that_meet
from .hlo import Instruction, Module, Shape, bits_of, dtype_name
from .locations import location_of
from .report import CompiledProduct
from .runs import Run, inside_fusions

# This pattern matches the calls of cuBLAS, cuBLASLt, cuDNN and oneDNN that run one product. It does
# not match a call that runs several, such as cuDNN's attention, whose products the text does not
# show.
_LIBRARY = re.compile(r"__(cublas|onednn)\$(?:\w+\$)*\w+$|__(cudnn)\$conv\w*$")
# This pattern matches the fusions that a library or code generator runs, such as "__ynn_fusion",
# "__triton_gemm" and "__cudnn$fusion".
_FUSED = re.compile(r'"kind":"__([a-z]+)')
_OPCODES = frozenset(("dot", "convolution", "ragged-dot", "scaled-dot"))


def products(run: Run, module: Module, platform: str) -> Iterator[CompiledProduct]:
    """Yields the products of a kernel, including those inside fusions."""
    is_fusion = run.instruction.opcode == "fusion"
    fused = _FUSED.search(run.instruction.attributes) if is_fusion else None
    inside = inside_fusions(run.instruction, run.within, module)
    for instruction, within in ((run.instruction, run.within), *inside):
        name = name_of_product(instruction)
        if name is None or len(instruction.operands) < 2:
            continue
        # An operand from an asynchronous copy is a tuple, whose first array is the value.
        lhs, rhs = (_first(within.get(operand)) for operand in instruction.operands[:2])
        result, location = instruction.shapes[0], location_of(instruction, module)
        flops = flops_of(instruction, lhs, rhs, result) if lhs.dtype and rhs.dtype else None
        library = _LIBRARY.match(name)
        kernel = (library[1] or library[2]) if library else (fused[1] if fused else "")
        # The TPU compiler writes every dot as a convolution.
        is_convolution = "conv" in name and "dot" not in location.operation
        yield CompiledProduct(
            kind="convolution" if is_convolution else "dot",
            operands=(dtype_name(lhs.dtype), dtype_name(rhs.dtype)),
            result=dtype_name(result.dtype),
            sums=dtype_name(_sums(result.dtype, kernel, platform)),
            kernel=kernel,
            precision=_precision(instruction),
            flops=None if flops is None else flops * run.times,
            times=run.times,
            scope=location.scope,
            source=location.source,
        )


def _first(operand: Instruction | None) -> Shape:
    """Returns the first shape of an operand; one with dtype ``""`` if it could not be parsed."""
    return operand.shapes[0] if operand and operand.shapes else Shape("", ())


def name_of_product(instruction: Instruction) -> str | None:
    """Returns the opcode or library call of a product, None for any other instruction."""
    if instruction.opcode in _OPCODES:
        return instruction.opcode
    found = _LIBRARY.match(instruction.target)
    return found[0] if found else None


def _precision(instruction: Instruction) -> str:
    if algorithm := instruction.attribute("algorithm"):
        return algorithm
    text = instruction.attribute("operand_precision") or ""
    found = re.search(r'"operand_precision":\[([^\]]*)\]', instruction.attributes)
    named = [name.lower() for name in re.findall(r"[A-Za-z]\w*", found[1] if found else text)]
    return max((name for name in named if name != "default"), key=len, default="")


def _sums(result: str, kernel: str, platform: str) -> str:
    """Returns the dtype of a product's accumulator, ``""`` if it is unknown.

    The matrix units of TPUs and GPUs, and the kernels of libraries, accumulate 16-bit products in
    float32. The code that XLA:CPU generates for a ``dot`` accumulates in the dtype of the result.
    In bfloat16 the sum of 4,096 addends of one sign is then half of the exact sum.
    """
    if bits_of(result) > 16 or (platform == "cpu" and not kernel):
        return result
    return "f32" if platform or kernel else ""


# --- floating point operations ------------------------------------------------------------------


def flops_of(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> int | None:
    """Returns the FLOPs of one run of a product, None if the text lacks its dimensions."""
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, lhs, rhs, result)
    if instruction.target == "__onednn$matmul":
        return 2 * result.elements * lhs.dims[-1]
    # A cuBLAS call has the contracting dimensions in its configuration.
    dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    text = dims[1] if dims else instruction.attribute("lhs_contracting_dims")
    if text is not None:
        return 2 * result.elements * math.prod(lhs.dims[d] for d in _numbers(text))
    if instruction.attribute("dim_labels"):
        return _cudnn_flops(instruction, lhs, rhs, result)
    return 2 * result.elements if instruction.opcode == "dot" else None


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _convolution_flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> int:
    """Returns the FLOPs of a convolution; multiplications by padding do not count.

    The TPU compiler writes every dot as a convolution. It turns a batch dimension into a spatial
    dimension: through padding and dilation, each element of it meets only one element of the other
    operand. If padding counted, a batched dot of 12 heads would have 12 times its FLOPs.
    """
    labels = instruction.attribute("dim_labels")
    lhs_labels, rhs_labels, result_labels = re.split("_|->", labels or "bf_io->bf")
    window = _window(instruction.attributes, sum(c.isdigit() for c in lhs_labels))
    positions = math.prod(
        pairs_that_meet(
            lhs.dims[lhs_labels.index(str(n))],
            rhs.dims[rhs_labels.index(str(n))],
            result.dims[result_labels.index(str(n))],
            *dim,
        )
        for n, dim in enumerate(window)
    )
    groups = int(instruction.attribute("batch_group_count") or 1)
    batch = lhs.dims[lhs_labels.index("b")] // groups
    features = result.dims[result_labels.index("f")]
    return 2 * positions * batch * features * rhs.dims[rhs_labels.index("i")]


def _window(attributes: str, rank: int) -> list[tuple[int, ...]]:
    """Returns stride, low padding, input dilation and kernel dilation for each dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in found[1].split()) if found else {}

    def per_dimension(name: str, default: str) -> list[str]:
        values = fields[name].split("x") if name in fields else [default] * rank
        return [value.split("_")[0] for value in values]

    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    each = itertools.starmap(per_dimension, defaults.items())
    return [tuple(map(int, dim)) for dim in zip(*each, strict=True)]


def _cudnn_flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> int:
    """Returns the FLOPs of a cuDNN convolution, or of its gradient, which has as many FLOPs."""
    # The operands are (input, kernel), (output gradient, kernel) or (input, output gradient).
    # dim_labels are always those of the forward convolution: input_kernel->output.
    output_labels = (instruction.attribute("dim_labels") or "").partition("->")[2]
    if "Filter" in instruction.target:
        kernel, output = result, rhs
    elif "Input" in instruction.target:
        kernel, output = rhs, lhs
    else:
        kernel, output = rhs, result
    features = output.dims[output_labels.index("f")]
    return 2 * output.elements * kernel.elements // max(features, 1)
