"""What devices exchange: the collectives of a compiled program, by dtype and bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from jmp_autocast.inspect.compiled.hlo import Instruction, Module, Shape
from jmp_autocast.inspect.compiled.runs import collective_of

from .traffic import Traffic

# What each of n devices sends of the bytes of its operand in a ring, which no algorithm beats in
# bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1 if n > 1 else 0,
    "collective-broadcast": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Args:
        kind: Its name and dtype: ``all-gather bf16``.
        times: How often it runs.
        nbytes: The bytes that a device sends in one run, by the best known algorithms: a ring.
            None where the text does not say which devices exchange.
    """

    kind: str
    times: int
    nbytes: int | None


def collectives(found: Traffic, module: Module) -> Iterator[Collective]:
    """Yields the collectives, one for each array that is exchanged."""
    for run in found.collectives:
        name = collective_of(run.instruction) or ""
        devices = _group_size(run.instruction, module)
        operands = [run.within[name] for name in run.instruction.operands]
        shapes = [shape for operand in operands for shape in operand.shapes]
        if name == "collective-permute":
            shapes = shapes[:1]  # others are buffers and offsets
        for shape in shapes:
            size = shape.elements * _bytes_of(shape)
            nbytes = None if devices is None else round(size * SENT[name](devices))
            yield Collective(f"{name} {shape.dtype}", run.times, nbytes)


def _bytes_of(shape: Shape) -> int:
    """Returns the bytes of an element, wherever the array lies."""
    return max(1, dataclasses.replace(shape, dims=(), on_chip=False).nbytes)


def _group_size(instruction: Instruction, module: Module) -> int | None:
    """Returns how many devices exchange with each other, None where the text does not say."""
    text = instruction.attributes
    if "source_target_pairs=" in text:
        return 2
    # How many groups of which size: [2,4]<=[8].
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(found[2])
    # The groups themselves: {{0,1},{2,3}}.
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return found[1].count(",") + 1
    # The axes of a mesh: mesh['data'=2,'model'=4] {'data'}, or a part of one: {'data':(1)2}.
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    # All devices: {}.
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", module.header)
    return math.prod(map(int, counts)) if counts else None
