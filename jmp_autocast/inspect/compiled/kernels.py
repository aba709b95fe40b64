"""The kernels of a compiled program: what each is, and the cycles estimated for it."""

from __future__ import annotations

import re

from .hlo import Module, dtype_name
from .places import place_of
from .products import name_of_product
from .report import CompiledKernel
from .runs import Run, inside_fusions

# A kernel of nothing but these only copies, or casts if a convert is among them. An asynchronous
# copy (`copy-start`) is neither: it brings an operand near while others compute.
_MOVES = frozenset("parameter bitcast copy tuple transpose reshape convert fusion".split())
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Where the TPU compiler has no estimate, it writes the largest number of 64 bits.
_SENTINEL = 2**60


def kernel_of(run: Run, module: Module) -> CompiledKernel:
    """Returns what a kernel is."""
    parts = [(run.instruction, run.within)]
    parts += inside_fusions(run.instruction, run.within, module)
    kind, (main, within), moved = "other", parts[0], False
    if multiplied := [part for part in parts if name_of_product(part[0]) is not None]:
        kind, (main, _) = "product", multiplied[0]
    elif moved := {instruction.opcode for instruction, _ in parts} <= _MOVES:
        # The first convert names the place in the program.
        converts = [part for part in parts if part[0].opcode == "convert"]
        kind, (main, within) = ("cast", converts[0]) if converts else ("copy", parts[0])
    operand = within.get(main.operands[0]) if moved and main.operands else None
    place = place_of(main, module)
    return CompiledKernel(
        name=run.instruction.name,
        kind=kind,
        operand=dtype_name(operand.shapes[0].dtype) if operand else "",
        result=dtype_name(run.instruction.shapes[0].dtype) if run.instruction.shapes else "",
        nbytes=run.times * _moved(run) if moved else None,
        cycles=cycles_of(run),
        times=run.times,
        scope=place.scope,
        source=place.source,
    )


def _moved(run: Run) -> int:
    """Returns the bytes that a cast or copy loads and stores; of a tuple it stores the first."""
    operands = [run.within[name] for name in run.instruction.operands if name in run.within]
    return sum(each.nbytes for each in operands) + run.instruction.shapes[0].nbytes


def cycles_of(run: Run) -> int | None:
    """Returns the cycles that the TPU compiler estimates for all times; None without an estimate.

    Asynchronous copies have none.
    """
    found = _CYCLES.search(run.instruction.attributes)
    if found is None or int(found[1]) > _SENTINEL:
        return None
    return run.times * int(found[1])
