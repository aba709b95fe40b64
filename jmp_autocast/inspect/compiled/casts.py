"""Which kernels of a compiled program do nothing but convert."""

from __future__ import annotations

from .hlo import Instruction, Module
from .traffic import Kernel, inside_fusions

_MOVES = frozenset(("parameter", "bitcast", "copy", "tuple", "transpose", "reshape", "convert"))


def first_convert(kernel: Kernel, module: Module) -> tuple[Instruction, str] | None:
    """Returns the first convert of a kernel that only converts, and the dtype that it reads."""
    inside = [(kernel.instruction, kernel.within)]
    inside += inside_fusions(kernel.instruction, kernel.within, module)
    opcodes = {instruction.opcode for instruction, _ in inside} - {"fusion"}
    if "convert" not in opcodes or not opcodes <= _MOVES:
        return None
    first, within = next(pair for pair in inside if pair[0].opcode == "convert")
    return first, within[first.operands[0]].shapes[0].dtype
