"""The converts of a compiled program, and which of them are kernels of their own."""

from __future__ import annotations

import collections

from .hlo import Instruction, Module
from .traffic import Kernel, Traffic, inside_fusions

_MOVES = frozenset(("parameter", "bitcast", "copy", "tuple", "transpose", "reshape", "convert"))


def converts(module: Module) -> collections.Counter[str]:
    """Returns how many converts the module has, by dtypes; one in a loop counts once."""
    counts: collections.Counter[str] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.values():
            if instruction.opcode == "convert":
                source = computation[instruction.operands[0]].shapes[0].dtype
                counts[f"{source} -> {instruction.shapes[0].dtype}"] += 1
    return counts


def convert_kernels(found: Traffic, module: Module) -> list[Kernel]:
    """Returns the kernels that do nothing but convert: a pass over the memory for a dtype alone."""
    return [kernel for kernel in found.kernels if first_convert(kernel, module)]


def first_convert(kernel: Kernel, module: Module) -> tuple[Instruction, str] | None:
    """Returns the first convert of a kernel that only converts, and the dtype that it reads."""
    inside = [(kernel.instruction, kernel.within)]
    inside += inside_fusions(kernel.instruction, kernel.within, module)
    opcodes = {instruction.opcode for instruction, _ in inside} - {"fusion"}
    if "convert" not in opcodes or not opcodes <= _MOVES:
        return None
    first, within = next(pair for pair in inside if pair[0].opcode == "convert")
    return first, within[first.operands[0]].shapes[0].dtype
