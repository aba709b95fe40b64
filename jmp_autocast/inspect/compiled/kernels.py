"""The kernels of a compiled program: their kinds, and the cycles estimated for them."""

from __future__ import annotations

import re

from .hlo import Module, dtype_name
from .locations import location_of
from .products import name_of_product
from .report import CompiledKernel
from .runs import Run, inside_fusions

# A kernel that has only these opcodes is a cast if one of them is a convert, and else a copy. An
# asynchronous copy (`copy-start`) is neither: it prefetches an operand while other kernels compute.
_MOVES = frozenset("parameter bitcast copy tuple transpose reshape convert fusion".split())
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The TPU compiler writes the largest 64-bit integer in place of a missing estimate.
_SENTINEL = 2**60


def kernel_of(run: Run, module: Module) -> CompiledKernel:
    """Returns the summary of a kernel."""
    parts = [(run.instruction, run.within)]
    parts += inside_fusions(run.instruction, run.within, module)
    kind, (main, within), moved = "other", parts[0], False
    if multiplied := [part for part in parts if name_of_product(part[0]) is not None]:
        kind, (main, _) = "product", multiplied[0]
    elif moved := {instruction.opcode for instruction, _ in parts} <= _MOVES:
        # A cast has the operand and the source location of its first convert.
        converts = [part for part in parts if part[0].opcode == "convert"]
        kind, (main, within) = ("cast", converts[0]) if converts else ("copy", parts[0])
    operand = within.get(main.operands[0]) if moved and main.operands else None
    location = location_of(main, module)
    return CompiledKernel(
        name=run.instruction.name,
        kind=kind,
        operand=dtype_name(operand.shapes[0].dtype) if operand else "",
        result=dtype_name(run.instruction.shapes[0].dtype) if run.instruction.shapes else "",
        nbytes=run.times * _moved_bytes(run) if moved else None,
        cycles=cycles_of(run),
        times=run.times,
        scope=location.scope,
        source=location.source,
    )


def _moved_bytes(run: Run) -> int:
    """Returns the bytes that a cast or copy loads and stores.

    If the result is a tuple, only its first array counts.
    """
    operands = [run.within[name] for name in run.instruction.operands if name in run.within]
    return sum(each.nbytes for each in operands) + run.instruction.shapes[0].nbytes


def cycles_of(run: Run) -> int | None:
    """Returns the cycles that the TPU compiler estimates for all runs, None without an estimate."""
    found = _CYCLES.search(run.instruction.attributes)
    if found is None or int(found[1]) > _SENTINEL:
        return None
    return run.times * int(found[1])
