"""How often the body of a loop of an HLO module runs."""

from __future__ import annotations

import math
import re

from .hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count"?:?\s*\{"?n"?:"?(\d+)')
_COMPARISONS = {"LT": 0, "LE": 1, "GT": 0, "GE": 1, "NE": 0}


def trip_count(loop: Instruction, within: Computation, module: Module) -> int | None:
    """Returns how often the body of a ``while`` runs, None where the text does not say.

    XLA:CPU and XLA:GPU write the count down. The TPU compiler does not; there the condition
    compares a counter with a number, and the body adds a number to it.

    Args:
        loop: The instruction.
        within: The computation that holds it.
        module: The module.
    """
    if found := _KNOWN.search(loop.attributes):
        return int(found[1])
    condition = module.body(loop, "condition")
    comparison = next((i for i in condition.values() if i.opcode == "compare"), None)
    if comparison is None:
        return None
    direction = comparison.attribute("direction")
    sides = [condition[name] for name in comparison.operands]
    limits = [_constant(side) for side in sides]
    if direction not in _COMPARISONS or [limit is None for limit in limits].count(True) != 1:
        return None
    (limit,) = [limit for limit in limits if limit is not None]
    counter = _index(sides[limits.index(None)])
    if counter is None:
        return None
    start = _start(within, loop, counter)
    step = _step(module.body(loop, "body"), counter)
    distance = abs(limit - start) + _COMPARISONS[direction]
    return math.ceil(distance / abs(step))


def _constant(instruction: Instruction) -> int | None:
    is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.inside)
    return int(instruction.inside) if is_number else None


def _index(instruction: Instruction) -> int | None:
    found = instruction.opcode == "get-tuple-element" and instruction.attribute("index")
    return int(found) if found else None


def _start(within: Computation, loop: Instruction, counter: int) -> int:
    """Returns what the counter starts with: 0 where it is not a number in the text."""
    state = within.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
        return 0
    first = within.get(state.operands[counter])
    while first is not None and first.opcode in ("copy", "bitcast"):
        first = within.get(first.operands[0])
    return (first is not None and _constant(first)) or 0


def _step(body: Computation, counter: int) -> int:
    """Returns what each run of the body adds to the counter: 1 where the text does not say."""
    root = next(i for i in body.values() if i.is_root)
    following = body.get(root.operands[counter]) if root.opcode == "tuple" else None
    if following is None or following.opcode not in ("add", "subtract"):
        return 1
    steps = [_constant(body[name]) for name in following.operands if name in body]
    return next((step for step in steps if step), 1)
