"""Kernels whose inside the text does not show: custom calls, by what they call and their dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .hlo import Instruction, Module, Shape
from .places import Place, place_of
from .products import name_of_product
from .traffic import Kernel, Traffic, inside_fusions

_ESTIMATE = re.compile(r'\\?"cost_estimate\\?":\s*\{[^}]*?\\?"flops\\?":\s*\\?"?(\d+)')
# Mosaic writes the name of a kernel into its metadata, Triton into its configuration.
_NAME = re.compile(r'kernel_name\\?"?\s*[:=]\s*\\?"([^"\\]+)|\{\s*name = \\?"([^"\\]+)')


class Call(NamedTuple):
    """A custom call that is no product: its inside may be anything.

    Args:
        target: What is called: ``"tpu_custom_call"``.
        name: The kernel's name, ``""`` where the text does not say.
        operands: The dtypes of its operands, as XLA names them.
        results: Those of its results.
        nbytes: The bytes that one run reads and writes.
        flops: What its author estimates of one run; None without an estimate.
        times: How often it runs.
        place: Where it comes from.
    """

    target: str
    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    nbytes: int
    flops: int | None
    times: int
    place: Place


def calls(found: Traffic, module: Module) -> Iterator[Call]:
    """Yields the custom calls that run, but for products and those that move no bytes."""
    for kernel in found.kernels:
        inside = inside_fusions(kernel.instruction, kernel.within, module)
        for instruction, within in ((kernel.instruction, kernel.within), *inside):
            if instruction.opcode == "custom-call" and name_of_product(instruction) is None:
                operands = [within[n].shapes for n in instruction.operands if n in within]
                yield _call(kernel, instruction, operands, module)


def _call(
    kernel: Kernel, instruction: Instruction, operands: Iterable[Sequence[Shape]], module: Module
) -> Call:
    estimate = _ESTIMATE.search(instruction.attributes)
    name, place = _NAME.search(instruction.attributes), place_of(instruction, module)
    # Pallas puts a kernel into a scope of its name.
    scope = place.scope.rpartition("/")[2] if place.operation == "pallas_call" else ""
    return Call(
        instruction.target,
        (name[1] or name[2]) if name else scope,
        tuple(shape.dtype for shapes in operands for shape in shapes),
        tuple(shape.dtype for shape in instruction.shapes),
        kernel.nbytes if kernel.instruction is instruction else 0,
        int(estimate[1]) if estimate else None,
        kernel.times,
        place,
    )
