"""Which instructions of a compiled program run by themselves, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .hlo import Computation, Instruction, Module
from .loops import trip_count

# These take no time: they name a value, wait for one, or tell the compiler something.
_FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier
    partition-id replica-id get-dimension-size
    copy-done slice-done async-update async-done send-done recv-done
    all-gather-done all-reduce-done collective-permute-done
    """.split()
)
_FREE_TARGETS = frozenset(
    """
    AllocateBuffer AssumeGatherIndicesInBound ConcatBitcast
    Sharding SPMDFullToShardShape SPMDShardToFullShape
    """.split()
)
_COLLECTIVES = frozenset(
    """
    all-gather all-reduce all-to-all ragged-all-to-all reduce-scatter
    collective-broadcast collective-permute
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction that runs by itself: a kernel, a collective or a loop.

    Args:
        instruction: The instruction.
        within: The computation that holds it.
        times: How often it runs in one run of the program.
        steps: How often the body of a loop runs each time; None where the text does not say.
    """

    instruction: Instruction
    within: Computation
    times: int
    steps: int | None = None

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop, whose body has runs of its own."""
        return self.instruction.opcode == "while"

    @property
    def is_kernel(self) -> bool:
        """Whether it computes: it is no loop, and exchanges nothing between devices."""
        return not self.is_loop and collective_of(self.instruction) is None


def runs(module: Module, weight: Callable[[Run], Any]) -> Iterator[Run]:
    """Yields what runs, loops before their bodies; of a conditional the branch that weighs most.

    A body of unknown count counts once. Collectives inside fusions are yielded after the fusion.

    Args:
        module: The module.
        weight: Returns the weight of a run, for instance its cycles.
    """
    return _inside(module.computations[module.entry], 1, module, weight)


def _inside(
    within: Computation, times: int, module: Module, weight: Callable[[Run], Any]
) -> Iterator[Run]:
    for instruction in within.values():
        match instruction.opcode:
            case "while":
                steps = trip_count(instruction, within, module)
                yield Run(instruction, within, times, steps)
                body = module.body(instruction, "body")
                yield from _inside(body, times * (steps or 1), module, weight)
            case "conditional":
                # One branch runs. The largest is the step that training is made of.
                branches = [
                    list(_inside(branch, times, module, weight))
                    for branch in branches_of(instruction, module)
                ]
                yield from max(branches, key=lambda branch: sum(map(weight, branch)))
            case "call":
                yield from _inside(module.body(instruction, "to_apply"), times, module, weight)
            case "async-start":
                yield from _inside(module.body(instruction, "calls"), times, module, weight)
            case _ if not is_free(instruction):
                yield Run(instruction, within, times)
                # The TPU compiler puts collectives into fusions with what they overlap with.
                for inner, inside in inside_fusions(instruction, within, module):
                    if collective_of(inner) is not None:
                        yield Run(inner, inside, times)


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction takes no time."""
    return instruction.opcode in _FREE or instruction.target in _FREE_TARGETS


def collective_of(instruction: Instruction) -> str | None:
    """Returns the name of a collective, None for any other instruction."""
    name = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return name if name in _COLLECTIVES else None


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
