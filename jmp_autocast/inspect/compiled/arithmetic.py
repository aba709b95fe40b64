"""All floating point operations of a compiled program, counted as XLA's own cost analysis does.

Elementwise operations count one for each element, whatever their dtype; what XLA calls
transcendental (``exp``, ``tanh``) and custom calls count nothing. A loop's body counts once, and so
does its condition, unless asked otherwise.
"""

from __future__ import annotations

import math
import re

from .hlo import Computation, Instruction, Module
from .loops import trip_count
from .products import flops_of
from .traffic import branches_of

_ELEMENTWISE = frozenset(
    """
    abs add and ceil clamp compare complex convert count-leading-zeros divide floor imag is-finite
    maximum minimum multiply negate not or popcnt real reduce-precision remainder
    round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic
    shift-right-logical sign stochastic-convert subtract xor
    """.split()
)


def flops_in(module: Module, *, loops: bool = False) -> int:
    """Returns the FLOPs of a module.

    Args:
        module: The module.
        loops: Multiply the body of a loop by the number of its steps, where the text says it.
    """
    return _Counter(module, loops).of(module.computations[module.entry])


class _Counter:
    def __init__(self, module: Module, loops: bool):
        self.module, self.loops = module, loops
        self.known: dict[int, int] = {}

    def of(self, body: Computation) -> int:
        key = id(body)
        if key not in self.known:
            self.known[key] = sum(self._instruction(each, body) for each in body.values())
        return self.known[key]

    def _called(self, instruction: Instruction, attribute: str) -> int:
        return self.of(self.module.body(instruction, attribute))

    def _instruction(self, each: Instruction, within: Computation) -> int:
        operands = [within[name] for name in each.operands if name in within]
        match each.opcode:
            case name if name in _ELEMENTWISE:
                return each.elements
            case "dot" | "ragged-dot" | "convolution":
                lhs, rhs = (operand.shapes[0] for operand in operands[:2])
                return flops_of(each, lhs, rhs, each.shapes[0]) or 0
            case "fusion" | "async-start":
                return self._called(each, "calls")
            case "call":
                return self._called(each, "to_apply")
            case "while":
                times = (trip_count(each, within, self.module) if self.loops else 1) or 1
                return times * sum(self._called(each, name) for name in ("body", "condition"))
            case "conditional":
                return max(map(self.of, branches_of(each, self.module)))
            case "reduce":
                summed = operands[0].shapes[0].elements - each.shapes[0].elements
                return summed * self._called(each, "to_apply")
            case "reduce-window":
                return _added_in_windows(each) * self._called(each, "to_apply")
            case "select-and-scatter":
                source = operands[1].shapes[0].elements
                compared = source * (_window_size(each) - 1)
                return compared * self._called(each, "select") + source * self._called(
                    each, "scatter"
                )
            case "map":
                return each.elements * self._called(each, "to_apply")
            case "scatter":
                return operands[2].shapes[0].elements * self._called(each, "to_apply")
            case "sort":
                length = operands[0].shapes[0].elements
                return length * max(length - 1, 0).bit_length()
            case "all-reduce" | "all-reduce-start":
                return each.elements
        return 0


def _added_in_windows(instruction: Instruction) -> int:
    """Returns how often a ``reduce-window`` adds, or takes the larger of two."""
    result, size = instruction.shapes[0], _window_size(instruction)
    # A window that reaches over all of one dimension from each of its n places: so the TPU compiler
    # writes a row's maximum beside each of its elements. It is found once, and XLA counts it so.
    found = re.search(r"window=\{size=[\dx]+ pad=([\d_x]+)\}", instruction.attributes)
    pads = [pad.split("_") for pad in found[1].split("x")] if found else []
    over = [k for k, pad in enumerate(pads) if pad != ["0", "0"]]
    if len(over) == 1 and pads[over[0]] == [str(result.dims[over[0]] - 1)] * 2:
        n = result.dims[over[0]]
        if size == 2 * n - 1:
            return result.elements // n + n - 1
    return result.elements * (size - 1)


def _window_size(instruction: Instruction) -> int:
    found = re.search(r"window=\{size=([\dx]+)", instruction.attributes)
    return math.prod(map(int, found[1].split("x"))) if found else 1
