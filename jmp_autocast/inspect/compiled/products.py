"""Which matmuls and convolutions a compiled program has, in which dtypes and in which kernels.

Read are ``dot`` and ``convolution`` instructions, and what XLA:CPU calls of oneDNN. A loop's body
is read once, whatever its number of steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# `%name (parameter: type) -> type {`, or `ENTRY %name ...`, and the `}` that ends it.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# A result of oneDNN comes with its scratchpad: `(bf16[2,8], u8[64])`.
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[([\d,]*)\]\S*(?: u8\S*)? ([\w\-]+)\((.*)$"
)
_KERNEL = re.compile(r'"kind":"__(\w+?)_fusion"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_ONEDNN = re.compile(r'custom_call_target="__onednn\$(matmul|convolution)"')
_FILTER = re.compile(r'"output_feature_dim":"(\d+)","shape":\[(.*?)\]')
_KINDS = {"dot": "dot", "convolution": "convolution", "matmul": "dot"}


class CompiledProduct(NamedTuple):
    """A matmul or convolution of a compiled program.

    Args:
        kind: ``"dot"`` or ``"convolution"``.
        operands: The dtypes of its two operands, as XLA names them: ``"bf16"``.
        result: That of its result.
        flops: Floating point operations of one run; None where the text does not say.
        kernel: The library that runs it: ``"ynn"`` or ``"onednn"``; ``""`` for XLA's own code.
    """

    kind: str
    operands: tuple[str, str]
    result: str
    flops: int | None
    kernel: str


def products_in(text: str) -> list[CompiledProduct]:
    """Returns the products of a compiled program.

    Args:
        text: The text of the compiled module, as ``jax.stages.Compiled.as_text`` returns it.

    Returns:
        One for each instruction that is a product.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(jnp.matmul).lower(jnp.ones((8, 4)), jnp.ones((4, 16))).compile()
        >>> [(p.operands, p.flops) for p in products_in(compiled.as_text())]
        [(('f32', 'f32'), 1024)]
    """
    lines = text.splitlines()
    in_kernel = {
        name: kernel[1]
        for line in lines
        if (kernel := _KERNEL.search(line))
        for name in _CALLS.findall(line)
    }
    found = []
    for name, body in _computations(lines):
        shapes: dict[str, tuple[str, list[int]]] = {}
        for line in body:
            if (instruction := _INSTRUCTION.match(line)) is None:
                continue
            result, dtype, dims, operation, rest = instruction.groups()
            shapes[result] = dtype, [int(n) for n in dims.split(",") if n]
            onednn = _ONEDNN.search(rest)
            kind = _KINDS.get(onednn[1] if onednn else operation)
            if kind is None or (operation == "custom-call" and not onednn):
                continue
            names = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])[:2]
            (left, lengths), (right, kernel) = (shapes[n] for n in names)
            count = _flops_in_onednn if onednn else _flops
            flops = count(kind, rest, shapes[result][1], lengths, kernel)
            library = "onednn" if onednn else in_kernel.get(name, "")
            found.append(CompiledProduct(kind, (left, right), dtype, flops, library))
    return found


def share_in_kernels(products: Iterable[CompiledProduct], dtype: str = "bf16") -> float:
    """Returns the share of the FLOPs that a library multiplies in a dtype, from 0 to 1.

    Example:
        >>> share_in_kernels(
        ...     [
        ...         CompiledProduct("dot", ("bf16", "bf16"), "f32", 3, "ynn"),
        ...         CompiledProduct("dot", ("f32", "f32"), "f32", 1, "ynn"),
        ...     ]
        ... )
        0.75
    """
    counted = [p for p in products if p.flops]
    fast = sum(p.flops or 0 for p in counted if p.kernel and p.operands == (dtype, dtype))
    return fast / max(sum(p.flops or 0 for p in counted), 1)


def _computations(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    name, body = None, []
    for line in lines:
        if opened := _COMPUTATION.match(line):
            name, body = opened[1], []
        elif line.startswith("}") and name is not None:
            yield name, body
            name = None
        else:
            body.append(line)


def _flops(kind: str, rest: str, out: list[int], lhs: list[int], rhs: list[int]) -> int:
    if kind == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        summed = math.prod(lhs[int(i)] for i in found[1].split(",") if i) if found else 1
        return 2 * math.prod(out) * summed
    found = re.search(r"dim_labels=\w+_(\w+)->", rest)
    labels = found[1] if found else ""
    summed = math.prod(n for label, n in zip(labels, rhs, strict=True) if label != "o")
    return 2 * math.prod(out) * summed


def _flops_in_onednn(
    kind: str, rest: str, out: list[int], lhs: list[int], rhs: list[int]
) -> int | None:
    if kind == "dot":
        # Batches, rows and columns in this order, whichever stands first in an operand.
        batches = math.prod(out[:-2])
        summed = math.isqrt(math.prod(lhs) * math.prod(rhs) // (math.prod(out) * batches))
        return 2 * math.prod(out) * summed
    if (found := _FILTER.search(rest)) is None:
        return None
    lengths = [int(n) for n in re.findall(r"\d+", found[2])]
    return 2 * math.prod(out) * math.prod(lengths) // lengths[int(found[1])]
