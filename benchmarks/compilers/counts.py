"""Products, converts and collectives of an optimized HLO module."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

from .hlo import Instruction, Module, Shape
from .traffic import Kernel, Traffic, inside_fusions

# Library calls that multiply matrices or convolve: cuBLAS, cuBLASLt, cuDNN.
_LIBRARY = re.compile(r'"(__cu(?:blas|dnn)[\w$]*)"')


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or a convolution.

    Args:
        kind: Which instruction or library call, and the dtypes: ``dot bf16 x bf16 -> f32``.
        times: How often it runs.
        flops: The floating-point operations of one run; None for a library call that does not say.
    """

    kind: str
    times: int
    flops: int | None


def products(found: Traffic, module: Module) -> Iterator[Product]:
    """Yields the matrix products and convolutions, those inside fusions too."""
    for kernel in found.kernels:
        inside = inside_fusions(kernel.instruction, kernel.within, module)
        for instruction, within in ((kernel.instruction, kernel.within), *inside):
            if (name := _name(instruction)) is None:
                continue
            operands = [within[name].shapes[0] for name in instruction.operands[:2]]
            result = instruction.shapes[0]
            dtypes = " x ".join(shape.dtype for shape in operands)
            yield Product(
                f"{name} {dtypes} -> {result.dtype}",
                kernel.times,
                _flops(instruction, *operands, result),
            )


def _name(instruction: Instruction) -> str | None:
    if instruction.opcode in ("dot", "convolution"):
        return instruction.opcode
    target = _LIBRARY.match(instruction.attribute("custom_call_target") or "")
    return target[1] if target else None


def _flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> int | None:
    match instruction.opcode:
        case "dot":
            dims = _numbers(instruction.attribute("lhs_contracting_dims") or "{}")
            return 2 * result.elements * math.prod(lhs.dims[d] for d in dims)
        case "convolution":
            return _convolution_flops(instruction, lhs, rhs, result)
    # cuBLAS keeps the dimensions of the dot in its configuration.
    dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    if dims:
        return 2 * result.elements * math.prod(lhs.dims[d] for d in _numbers(dims[1]))
    if instruction.attribute("dim_labels"):
        return _cudnn_flops(instruction, lhs, rhs, result)
    return None


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _convolution_flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> int:
    """Counts the multiplications with an element of the input, not those with padding.

    A TPU runs every dot as a convolution, batch dimensions among them as spatial ones whose padding
    and dilation meet one element only: counting windows would make a batched dot of 12 heads 12
    times too large.
    """
    labels = instruction.attribute("dim_labels")
    lhs_labels, rhs_labels, result_labels = re.split("_|->", labels)
    window = _window(instruction.attributes, sum(c.isdigit() for c in lhs_labels))
    positions = math.prod(
        _valid_positions(
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


def _window(attributes: str, rank: int) -> list[tuple[int, int, int, int]]:
    """Returns stride, low padding, dilation of the input and of the kernel for each dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in found[1].split()) if found else {}

    def per_dimension(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * rank

    strides = map(int, per_dimension("stride", "1"))
    pads = (int(pad.split("_")[0]) for pad in per_dimension("pad", "0_0"))
    lhs_dilations = map(int, per_dimension("lhs_dilate", "1"))
    rhs_dilations = map(int, per_dimension("rhs_dilate", "1"))
    return list(zip(strides, pads, lhs_dilations, rhs_dilations, strict=True))


@functools.cache
def _valid_positions(
    size: int, kernel: int, result: int, stride: int, pad: int, dilation: int, kernel_dilation: int
) -> int:
    """Returns how many pairs of a result's and a kernel's position meet an element of the input."""
    valid = 0
    for k in range(kernel):
        first = k * kernel_dilation - pad
        # Position p of the result meets the element (first + p * stride) / dilation.
        for at in range(first, first + result * stride, stride):
            valid += at % dilation == 0 and 0 <= at < size * dilation
    return valid


def _cudnn_flops(instruction: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> int:
    """Counts the FLOPs of a cuDNN convolution: each of the three kinds does the same products."""
    # The operands are (input, kernel), (output gradient, kernel) or (input, output gradient).
    target = instruction.attribute("custom_call_target") or ""
    # dim_labels say what stands where in the forward convolution: input_kernel->output.
    output_labels = (instruction.attribute("dim_labels") or "").partition("->")[2]
    if "Filter" in target:
        kernel, output = result, rhs
    elif "Input" in target:
        kernel, output = rhs, lhs
    else:
        kernel, output = rhs, result
    features = output.dims[output_labels.index("f")]
    return 2 * output.elements * kernel.elements // max(features, 1)


def converts(module: Module) -> collections.Counter[str]:
    """Returns how many converts the module has, by dtypes; one in a loop counts once."""
    counts: collections.Counter[str] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.values():
            if instruction.opcode == "convert":
                source = computation[instruction.operands[0]].shapes[0].dtype
                counts[f"{source} -> {instruction.shapes[0].dtype}"] += 1
    return counts


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Args:
        kind: Its name and dtype: ``all-gather bf16``.
        times: How often it runs.
        nbytes: The bytes that a device sends in one run, by the best known algorithms: a ring.
    """

    kind: str
    times: int
    nbytes: int


def collectives(found: Traffic) -> Iterator[Collective]:
    """Yields the collectives, one for each array that is exchanged."""
    for kernel in found.collectives:
        name = kernel.instruction.opcode.removesuffix("-start")
        devices = _group_size(kernel.instruction)
        operands = [kernel.within[name] for name in kernel.instruction.operands]
        shapes = [shape for operand in operands for shape in operand.shapes]
        if name == "collective-permute":
            shapes = shapes[:1]  # others are buffers and offsets
        for shape in shapes:
            size = shape.elements * _bytes_of(shape)
            share = (devices - 1) / devices
            sent = {
                "all-gather": size * (devices - 1),  # hands its own part on, and n - 2 others
                "all-reduce": 2 * size * share,  # a reduce-scatter and an all-gather
                "reduce-scatter": size * share,
                "all-to-all": size * share,
            }.get(name, size)
            yield Collective(f"{name} {shape.dtype}", kernel.times, round(sent))


def _bytes_of(shape: Shape) -> int:
    """Returns the bytes of an element, wherever the array lies."""
    return max(1, dataclasses.replace(shape, dims=(), on_chip=False).nbytes)


def _group_size(instruction: Instruction) -> int:
    """Returns how many devices exchange with each other."""
    text = instruction.attributes
    if "source_target_pairs=" in text:
        return 2
    # How many groups of which size: [2,4]<=[8].
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(found[2])
    # The groups themselves: {{0,1},{2,3}}.
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return found[1].count(",") + 1
    # The axes of a mesh: mesh['data'=2,'model'=4] {'data'}, or a part of one: {'data':(1)2}.
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    raise ValueError(f"{instruction.name} does not say which devices exchange: {text[:200]}")


def by_kind(items: Iterator[Product] | Iterator[Collective]) -> dict[str, tuple[int, int]]:
    """Adds up how often each kind runs, and its FLOPs or bytes; the largest first."""
    groups: dict[str, list[int]] = {}
    for item in items:
        amount = item.flops if isinstance(item, Product) else item.nbytes
        count = groups.setdefault(item.kind, [0, 0])
        count[0] += item.times
        count[1] += item.times * (amount or 0)
    ordered = sorted(groups.items(), key=lambda group: -group[1][1])
    return {kind: (times, amount) for kind, (times, amount) in ordered}


def convert_kernels(found: Traffic, module: Module) -> list[Kernel]:
    """Returns the kernels that do nothing but convert: a pass over the memory for a dtype alone."""
    moves = {"parameter", "bitcast", "copy", "tuple", "transpose", "convert"}

    def converts_only(kernel: Kernel) -> bool:
        inside = inside_fusions(kernel.instruction, kernel.within, module)
        opcodes = {i.opcode for i, _ in itertools.chain([(kernel.instruction, None)], inside)}
        return "convert" in opcodes and opcodes - {"fusion"} <= moves

    return [kernel for kernel in found.kernels if converts_only(kernel)]
