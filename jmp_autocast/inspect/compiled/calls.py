"""Kernels whose inside the text does not show: custom calls, by what they call and their dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from .hlo import Instruction, Module, Shape, dtype_name
from .places import place_of
from .products import name_of_product
from .report import CompiledCall
from .traffic import Kernel, Traffic, inside_fusions

_ESTIMATE = re.compile(r'\\?"cost_estimate\\?":\s*\{[^}]*?\\?"flops\\?":\s*\\?"?(\d+)')
# Mosaic writes the name of a kernel into its metadata, Triton into its configuration.
_NAME = re.compile(r'kernel_name\\?"?\s*[:=]\s*\\?"([^"\\]+)|\{\s*name = \\?"([^"\\]+)')


def calls(found: Traffic, module: Module) -> Iterator[CompiledCall]:
    """Yields the custom calls that run, but for products and those that move no bytes."""
    for kernel in found.kernels:
        inside = inside_fusions(kernel.instruction, kernel.within, module)
        for instruction, within in ((kernel.instruction, kernel.within), *inside):
            if instruction.opcode == "custom-call" and name_of_product(instruction) is None:
                operands = [within[n].shapes for n in instruction.operands if n in within]
                yield _call(kernel, instruction, operands, module)


def _call(
    kernel: Kernel, instruction: Instruction, operands: Iterable[Sequence[Shape]], module: Module
) -> CompiledCall:
    estimate = _ESTIMATE.search(instruction.attributes)
    name, place = _NAME.search(instruction.attributes), place_of(instruction, module)
    # Pallas puts a kernel into a scope of its name.
    scope = place.scope.rpartition("/")[2] if place.operation == "pallas_call" else ""
    return CompiledCall(
        target=instruction.target,
        name=(name[1] or name[2]) if name else scope,
        operands=tuple(dtype_name(shape.dtype) for shapes in operands for shape in shapes),
        results=tuple(dtype_name(shape.dtype) for shape in instruction.shapes),
        nbytes=kernel.nbytes * kernel.times if kernel.instruction is instruction else 0,
        flops=int(estimate[1]) * kernel.times if estimate else None,
        times=kernel.times,
        scope=place.scope,
        source=place.source,
    )
