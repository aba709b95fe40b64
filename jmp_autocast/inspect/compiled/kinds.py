"""What a kernel is (a product, a cast, a copy, other), and the cycles estimated for it."""

from __future__ import annotations

import re
from typing import NamedTuple

from .hlo import Instruction, Module
from .products import name_of_product
from .runs import Run, inside_fusions

KINDS = ("product", "cast", "copy", "other")

# A kernel of nothing but these only copies, or casts if a convert is among them.
_MOVES = frozenset(
    "parameter bitcast copy copy-start tuple transpose reshape convert fusion".split()
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Where the TPU compiler has no estimate, it writes the largest number of 64 bits.
_SENTINEL = 2**60


class Kind(NamedTuple):
    """What a kernel is.

    Args:
        name: One of `KINDS`.
        main: The instruction that makes it so, such as the first convert of a cast: it names the
            place in the program.
        operand: The dtype that a cast or copy reads, as XLA names it; ``""`` for others.
    """

    name: str
    main: Instruction
    operand: str = ""


def kind_of(run: Run, module: Module) -> Kind:
    """Returns what a kernel is."""
    parts = [(run.instruction, run.within)]
    parts += inside_fusions(run.instruction, run.within, module)
    for instruction, _ in parts:
        if name_of_product(instruction) is not None:
            return Kind("product", instruction)
    if not {instruction.opcode for instruction, _ in parts} <= _MOVES:
        return Kind("other", run.instruction)
    converts = [part for part in parts if part[0].opcode == "convert"]
    main, within = (converts or parts)[0]
    source = within.get(main.operands[0]) if main.operands else None
    operand = source.shapes[0].dtype if source is not None else ""
    return Kind("cast" if converts else "copy", main, operand)


def cycles_of(run: Run) -> int | None:
    """Returns the cycles that the TPU compiler estimates for all times; None without an estimate.

    Asynchronous copies have none.
    """
    found = _CYCLES.search(run.instruction.attributes)
    if found is None or int(found[1]) > _SENTINEL:
        return None
    return run.times * int(found[1])
