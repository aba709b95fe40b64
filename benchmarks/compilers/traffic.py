"""The bytes that the kernels of an optimized HLO module read and write.

It is one yardstick for all programs and compilers: an instruction outside of fusions is a kernel,
which reads each operand and writes its result once; loops multiply. Of arrays that are sliced or
updated in place only the slices count, and arrays that lie on the chip do not count. No cost model
and no measurement is in it, so that a difference has a cause in the text.
"""

from __future__ import annotations

import collections
import dataclasses
from fractions import Fraction
from typing import TypeAlias

from jmp_autocast.inspect.compiled.hlo import Computation, Instruction, Module
from jmp_autocast.inspect.compiled.runs import Run, collective_of, runs

# Each element of the result needs the same element of each operand, or one moved: a fusion that
# slices the result reads slices of the operands.
_ONE_TO_ONE = frozenset(
    """
    bitcast bitcast-convert convert copy reshape transpose negate abs exponential log tanh sqrt
    rsqrt logistic sign floor ceil cosine sine not is-finite reduce-precision real imag
    exponential-minus-one log-plus-one cbrt erf tan round-nearest-even round-nearest-afz
    add subtract multiply divide remainder maximum minimum power atan2 and or xor
    shift-left shift-right-logical shift-right-arithmetic compare select clamp complex
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, and what it reads and writes in one run."""

    run: Run
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What runs in a program.

    Args:
        kernels: All kernels; collectives are not among them.
        collectives: The collectives, those inside fusions too.
        unknown_loops: The names of loops of unknown length: their bodies count once.
        unread: The names of kernels whose bytes cannot be told from the text: they count none.
    """

    kernels: tuple[Kernel, ...]
    collectives: tuple[Run, ...]
    unknown_loops: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """What all kernels read and write."""
        return sum(kernel.run.times * kernel.nbytes for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """How many kernels run."""
        return sum(kernel.run.times for kernel in self.kernels)


def traffic(module: Module) -> Traffic:
    """Reads the traffic of a module; of a conditional the branch counts that moves most."""

    def nbytes_of(run: Run) -> int | None:
        try:
            return moved_bytes(run.instruction, run.within, module) if run.is_kernel else 0
        except (LookupError, ValueError):  # a line that it needs could not be read
            return None

    found = list(runs(module, lambda run: run.times * (nbytes_of(run) or 0)))
    kernels = [(run, nbytes_of(run)) for run in found if run.is_kernel]
    return Traffic(
        tuple(Kernel(run, nbytes or 0) for run, nbytes in kernels),
        tuple(run for run in found if collective_of(run.instruction)),
        tuple(run.instruction.name for run in found if run.is_loop and run.steps is None),
        tuple(run.instruction.name for run, nbytes in kernels if nbytes is None),
    )


def moved_bytes(instruction: Instruction, within: Computation, module: Module) -> int:
    """Returns the bytes that one run of a kernel reads and writes."""
    operands = [within[name] for name in instruction.operands if name in within]
    match instruction.opcode:
        case "fusion":
            body = module.body(instruction, "calls")
            return _FusionReader(module).moved(body, operands)
        case "dynamic-slice" | "slice":
            return _slice_bytes(instruction, operands[0]) + instruction.nbytes
        case "gather":
            indices = sum(operand.nbytes for operand in operands[1:])
            return _slice_bytes(instruction, operands[0]) + instruction.nbytes + indices
        case "dynamic-update-slice":
            return 2 * operands[1].nbytes  # reads the update and writes it, in place
        case "scatter":
            # Reads updates, indices and the rows that they go to, and writes those rows.
            return 3 * operands[2].nbytes + operands[1].nbytes
        case "copy-start":
            # Its result is a tuple: the copy, the operand again, and a context.
            return operands[0].nbytes + instruction.shapes[0].nbytes
        case "slice-start":
            return _slice_bytes(instruction, operands[0]) + instruction.shapes[-2].nbytes
        case "custom-call":
            return sum(operand.nbytes for operand in operands) + _without_scratch(instruction)
    return sum(operand.nbytes for operand in operands) + instruction.nbytes


def _elements(instruction: Instruction) -> int:
    return sum(shape.elements for shape in instruction.shapes)


def _slice_bytes(instruction: Instruction, whole: Instruction) -> int:
    """Returns the bytes of a slice where it is read: none where the whole lies on the chip."""
    elements = _elements(instruction)
    return (
        whole.nbytes * elements // _elements(whole) if _elements(whole) > elements else whole.nbytes
    )


def _without_scratch(instruction: Instruction) -> int:
    """Returns the bytes of a library call's results without its scratch memory, a last s8 array."""
    shapes = instruction.shapes
    if len(shapes) > 1 and shapes[-1].dtype in ("s8", "u8") and len(shapes[-1].dims) == 1:
        shapes = shapes[:-1]
    return sum(shape.nbytes for shape in shapes)


# Instructions that read a part of a value, each with the share of the value that it reads.
_Parts: TypeAlias = dict[Instruction, Fraction]


def _share(part: Instruction, whole: Instruction) -> Fraction:
    return min(Fraction(_elements(part), max(_elements(whole), 1)), Fraction(1))


class _FusionReader:
    """Reads how much of its operands a fusion reads, and what it writes."""

    def __init__(self, module: Module):
        self.module = module
        self.parts: dict[Instruction, _Parts] = {}

    def moved(self, body: Computation, operands: list[Instruction]) -> int:
        """Returns the bytes that a fusion with this body moves."""
        (root,) = (i for i in body.values() if i.is_root)
        readers = _readers(body)
        read = 0
        for inner in body.values():
            if inner.opcode == "parameter":
                nbytes = operands[int(inner.inside)].nbytes
                read += int(nbytes * min(sum(self._parts(inner, body, readers).values()), 1))
        return read + self._written(root, body)

    def _parts(
        self, value: Instruction, body: Computation, readers: dict[str, list[Instruction]]
    ) -> _Parts:
        """Returns which parts of a value the instructions after it need.

        One that needs all of it is a part of 1. Two ways to the same slice are one part.
        """
        if value not in self.parts:
            found: _Parts = {}
            for reader in readers[value.name]:
                found.update(self._parts_for(reader, value, body, readers))
            self.parts[value] = found
        return self.parts[value]

    def _parts_for(
        self,
        reader: Instruction,
        value: Instruction,
        body: Computation,
        readers: dict[str, list[Instruction]],
    ) -> _Parts:
        is_first = reader.operands[0] == value.name
        if reader.opcode in ("dynamic-slice", "slice", "gather") and is_first:
            return {reader: _share(reader, value)}
        if reader.opcode == "dynamic-update-slice" and is_first and _in_place(reader, body):
            return {}  # else it reads all that it does not overwrite
        if reader.opcode == "scatter" and is_first and _in_place(reader, body):
            return {reader: _share(body[reader.operands[2]], value)}
        if reader.opcode == "tuple" and _base(value, body).opcode == "parameter":
            return {}  # hands it out as it is: the result is the operand's buffer
        if reader.opcode == "fusion":
            return self._parts_inside(value, reader)
        if reader.opcode in _ONE_TO_ONE and not reader.is_root:
            return self._parts(reader, body, readers)
        if reader.opcode == "reduce" and is_first and not reader.is_root:
            # A share of the sums needs that share of what is summed: of the splits of a matmul a
            # gate of an LSTM sums its quarter.
            return self._parts(reader, body, readers)
        return {reader: Fraction(1)}

    def _parts_inside(self, value: Instruction, fusion: Instruction) -> _Parts:
        inner_body = self.module.body(fusion, "calls")
        readers = _readers(inner_body)
        positions = [n for n, name in enumerate(fusion.operands) if name == value.name]
        found: _Parts = {}
        for inner in inner_body.values():
            if inner.opcode == "parameter" and int(inner.inside) in positions:
                found.update(self._parts(inner, inner_body, readers))
        return found

    def _written(self, root: Instruction, body: Computation) -> int:
        """Returns the bytes that a fusion with this root writes."""
        match root.opcode:
            case "tuple":
                parts = [body[name] for name in root.operands]
                return sum(self._written(part, body) for part in parts)
            case "parameter":
                return 0
            case "bitcast":
                return self._written(body[root.operands[0]], body)
            case "dynamic-update-slice" if _in_place(root, body):
                return _same_place(root, body[root.operands[1]])
            case "scatter" if _in_place(root, body):
                return _same_place(root, body[root.operands[2]])
            case "fusion":
                inner = self.module.body(root, "calls")
                (inner_root,) = (i for i in inner.values() if i.is_root)
                return self._written(inner_root, inner)
        return root.nbytes


def _same_place(root: Instruction, update: Instruction) -> int:
    return root.nbytes * _elements(update) // max(_elements(root), 1)


def _readers(body: Computation) -> dict[str, list[Instruction]]:
    readers = collections.defaultdict(list)
    for inner in body.values():
        for name in dict.fromkeys(inner.operands):
            readers[name].append(inner)
    return readers


def _in_place(update: Instruction, body: Computation) -> bool:
    """Says whether an update inside a fusion writes into the buffer of a parameter."""
    return _base(body[update.operands[0]], body).opcode == "parameter"


def _base(value: Instruction, body: Computation) -> Instruction:
    """Returns what lies under the bitcasts of a value."""
    while value.opcode == "bitcast":
        value = body[value.operands[0]]
    return value
