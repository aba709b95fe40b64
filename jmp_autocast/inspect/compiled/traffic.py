"""The bytes that the kernels of an optimized HLO module read and write.

It is one yardstick for all programs and compilers: an instruction outside of fusions is a kernel,
which reads each operand and writes its result once; loops multiply. Of arrays that are sliced or
updated in place only the slices count, and arrays that lie on the chip do not count. No cost model
and no measurement is in it, so that a difference has a cause in the text.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import TypeAlias

from ..report.wire import COLLECTIVES
from .hlo import Computation, Instruction, Module
from .loops import trip_count

# These move no bytes: they name a value, wait for one, or tell the compiler something.
FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier
    partition-id replica-id get-dimension-size
    copy-done slice-done async-update async-done send-done recv-done
    all-gather-done all-reduce-done collective-permute-done
    """.split()
)
FREE_TARGETS = frozenset(
    """
    AllocateBuffer AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape
    """.split()
)
# What each of n devices sends of the bytes of its operand, by the opcode. JAX has no broadcast.
SENT = {each.compiled: each.sent for each in COLLECTIVES.values()}
SENT["collective-broadcast"] = lambda n: 1
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


# A kernel of nothing but a convert and these only casts.
_MOVES = frozenset(("parameter", "bitcast", "copy", "tuple", "transpose", "reshape", "convert"))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that runs by itself.

    Args:
        instruction: The instruction.
        within: The computation that holds it.
        times: How often it runs in one run of the program.
        nbytes: What it reads and writes in one run.
    """

    instruction: Instruction
    within: Computation
    times: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a program.

    Args:
        instruction: The ``while``.
        times: How often it is entered in one run of the program.
        steps: How often its body runs each time; None where the text does not say.
    """

    instruction: Instruction
    times: int
    steps: int | None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The kernels of a program.

    Args:
        kernels: All kernels; collectives are not among them.
        collectives: The collectives, those inside fusions too.
        loops: The loops; a body of unknown count counts once.
        unread: Names of kernels whose bytes cannot be told from the text: they count none.
    """

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Kernel, ...] = ()
    loops: tuple[Loop, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """What all kernels read and write."""
        return sum(kernel.times * kernel.nbytes for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """How many kernels run."""
        return sum(kernel.times for kernel in self.kernels)


def traffic(module: Module) -> Traffic:
    """Reads the traffic of a module."""
    return _visited(module, module.computations[module.entry], 1)


def _visited(module: Module, within: Computation, times: int) -> Traffic:
    """Returns what runs: of the entry, bodies of loops, calls, and a branch of each conditional."""
    parts = [
        found
        for instruction in within.values()
        for found in _visit_instruction(module, instruction, within, times)
    ]
    kernels, collectives, loops, unread = (
        tuple(itertools.chain.from_iterable(getattr(part, name) for part in parts))
        for name in ("kernels", "collectives", "loops", "unread")
    )
    return Traffic(kernels, collectives, loops, unread)


def _visit_instruction(
    module: Module, instruction: Instruction, within: Computation, times: int
) -> Iterator[Traffic]:
    opcode = instruction.opcode
    if opcode == "while":
        count = trip_count(instruction, within, module)
        yield Traffic(loops=(Loop(instruction, times, count),))
        yield _visited(module, module.body(instruction, "body"), times * (count or 1))
    elif opcode == "conditional":
        # One branch runs. The one that moves most is the step that training is made of.
        branches = [_visited(module, branch, times) for branch in branches_of(instruction, module)]
        yield max(branches, key=lambda branch: branch.nbytes)
    elif opcode == "call":
        yield _visited(module, module.body(instruction, "to_apply"), times)
    elif opcode == "async-start":
        yield _visited(module, module.body(instruction, "calls"), times)
    elif is_collective(instruction):
        if not opcode.endswith("-done"):
            yield Traffic(collectives=(Kernel(instruction, within, times, 0),))
    elif opcode not in FREE and instruction.target not in FREE_TARGETS:
        try:
            nbytes, unread = moved_bytes(instruction, within, module), ()
        except (LookupError, ValueError):  # a line that it needs could not be read
            nbytes, unread = 0, (instruction.name,)
        yield Traffic((Kernel(instruction, within, times, nbytes),), unread=unread)
        for inner, inside in inside_fusions(instruction, within, module):
            # The TPU compiler puts collectives into fusions with what they overlap with.
            if is_collective(inner):
                yield Traffic(collectives=(Kernel(inner, inside, times, 0),))


def is_collective(instruction: Instruction) -> bool:
    """Says whether an instruction exchanges data between devices."""
    name = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return name in SENT


def branches_of(instruction: Instruction, module: Module) -> list[Computation]:
    """Returns the branches of a conditional."""
    listed = instruction.attribute("branch_computations")
    if listed:
        names = [name.strip().lstrip("%") for name in listed.strip("{}").split(",")]
        return [module.computations[name] for name in names]
    return [module.body(instruction, f"{answer}_computation") for answer in ("true", "false")]


def inside_fusions(
    instruction: Instruction, within: Computation, module: Module
) -> Iterator[tuple[Instruction, Computation]]:
    """Yields the instructions of a fusion and of the fusions in it, each with its computation."""
    if instruction.opcode == "fusion":
        body = module.body(instruction, "calls")
        for inner in body.values():
            yield inner, body
            yield from inside_fusions(inner, body, module)


def first_convert(kernel: Kernel, module: Module) -> tuple[Instruction, str] | None:
    """Returns the first convert of a kernel that only converts, and the dtype that it reads."""
    inside = [(kernel.instruction, kernel.within)]
    inside += inside_fusions(kernel.instruction, kernel.within, module)
    opcodes = {instruction.opcode for instruction, _ in inside} - {"fusion"}
    if "convert" not in opcodes or not opcodes <= _MOVES:
        return None
    first, within = next(pair for pair in inside if pair[0].opcode == "convert")
    return first, within[first.operands[0]].shapes[0].dtype


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


def _slice_bytes(instruction: Instruction, whole: Instruction) -> int:
    """Returns the bytes of a slice where it is read: none where the whole lies on the chip."""
    elements = instruction.elements
    return whole.nbytes * elements // whole.elements if whole.elements > elements else whole.nbytes


def _without_scratch(instruction: Instruction) -> int:
    """Returns the bytes of a library call's results without its scratch memory, a last s8 array."""
    shapes = instruction.shapes
    if len(shapes) > 1 and shapes[-1].dtype in ("s8", "u8") and len(shapes[-1].dims) == 1:
        shapes = shapes[:-1]
    return sum(shape.nbytes for shape in shapes)


# Instructions that read a part of a value, each with the share of the value that it reads.
_Parts: TypeAlias = dict[Instruction, Fraction]


def _share(part: Instruction, whole: Instruction) -> Fraction:
    return min(Fraction(part.elements, max(whole.elements, 1)), Fraction(1))


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
    return root.nbytes * update.elements // max(root.elements, 1)


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
