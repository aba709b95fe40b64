"""The instructions of a compiled program that run as kernels of their own, and how often."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from .hlo import Computation, Instruction, Module

# These instructions take no time: they name a value, wait for it, or annotate it for the compiler.
_FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier
    partition-id replica-id get-dimension-size
    copy-done slice-done async-update async-done send-done recv-done
    all-gather-done all-reduce-done collective-permute-done
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
_KNOWN_STEPS = re.compile(r'known_trip_count"?:?\s*\{"?n"?:"?(\d+)')
# The key is the comparison of a loop's counter `i` with its limit. The distance between start and
# limit, plus the number here, divided by the step of `i`, is the number of iterations: `i <= limit`
# holds once more than `i < limit`.
_COMPARISONS = {"LT": 0, "LE": 1, "GT": 0, "GE": 1, "NE": 0}


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction that runs by itself: a kernel, a collective or a loop.

    Args:
        instruction: The instruction.
        within: The computation that holds it.
        times: How often it runs in one run of the program.
        steps: The number of iterations of a loop; None if it is unknown.
    """

    instruction: Instruction
    within: Computation
    times: int
    steps: int | None = None

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop; the instructions of its body have runs of their own."""
        return self.instruction.opcode == "while"

    @property
    def is_kernel(self) -> bool:
        """Whether it computes: it is neither a loop nor a collective."""
        return not self.is_loop and collective_of(self.instruction) is None


def runs(module: Module, weight: Callable[[Run], Any]) -> Iterator[Run]:
    """Yields the runs of a module, loops before their bodies.

    The body of a loop of unknown length counts once. Of a conditional, only the branch with the
    largest sum of ``weight`` is included. A collective inside a fusion has a run of its own, after
    that of the fusion.
    """
    return _inside(module.computations[module.entry], 1, module, weight)


def _inside(
    within: Computation, times: int, module: Module, weight: Callable[[Run], Any]
) -> Iterator[Run]:
    for instruction in within.values():
        match instruction.opcode:
            case "while":
                steps = _trip_count(instruction, within, module)
                yield Run(instruction, within, times, steps)
                body = module.body(instruction, "body")
                yield from _inside(body, times * (steps or 1), module, weight)
            case "conditional":
                # A training step is assumed to take the branch of the largest weight.
                branches = [
                    list(_inside(branch, times, module, weight))
                    for branch in _branches(instruction, module)
                ]
                yield from max(branches, key=lambda branch: sum(map(weight, branch)))
            case "call" | "async-start" as opcode:
                name = "to_apply" if opcode == "call" else "calls"
                yield from _inside(module.body(instruction, name), times, module, weight)
            case _ if not is_free(instruction):
                yield Run(instruction, within, times)
                # The TPU compiler fuses a collective with operations that run at the same time.
                for inner, inside in inside_fusions(instruction, within, module):
                    if collective_of(inner) is not None:
                        yield Run(inner, inside, times)


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction takes no time."""
    return not _FREE.isdisjoint((instruction.opcode, instruction.target))


def collective_of(instruction: Instruction) -> str | None:
    """Returns the name of a collective, None for any other instruction."""
    name = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return name if name in _COLLECTIVES else None


def _branches(instruction: Instruction, module: Module) -> list[Computation]:
    if listed := instruction.attribute("branch_computations"):
        names = [name.strip().lstrip("%") for name in listed.strip("{}").split(",")]
        return [module.computations[name] for name in names]
    return [module.body(instruction, f"{answer}_computation") for answer in ("true", "false")]


def inside_fusions(
    instruction: Instruction, within: Computation, module: Module
) -> Iterator[tuple[Instruction, Computation]]:
    """Yields the instructions of a fusion and its inner fusions, each with its computation."""
    if instruction.opcode == "fusion":
        body = module.body(instruction, "calls")
        for inner in body.values():
            yield inner, body
            yield from inside_fusions(inner, body, module)


# --- loops --------------------------------------------------------------------------------------


def _trip_count(loop: Instruction, within: Computation, module: Module) -> int | None:
    """Returns the number of iterations of a ``while``, None if the text lacks it.

    XLA:CPU and XLA:GPU write the number. In the text of the TPU compiler the condition compares a
    counter with a constant, and the body adds a constant to the counter.
    """
    if found := _KNOWN_STEPS.search(loop.attributes):
        return int(found[1])
    condition = module.body(loop, "condition")
    comparison = next((i for i in condition.values() if i.opcode == "compare"), None)
    if comparison is None:
        return None
    extra = _COMPARISONS.get(comparison.attribute("direction") or "")
    sides = [condition[name] for name in comparison.operands]
    limits = [_constant(side) for side in sides]
    if extra is None or limits.count(None) != 1:
        return None
    (limit,) = [limit for limit in limits if limit is not None]
    index = sides[limits.index(None)]
    counter = index.opcode == "get-tuple-element" and index.attribute("index")
    if not counter:
        return None
    step = _step(module.body(loop, "body"), int(counter))
    return math.ceil((abs(limit - _start(within, loop, int(counter))) + extra) / abs(step))


def _constant(instruction: Instruction) -> int | None:
    is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.inside)
    return int(instruction.inside) if is_number else None


def _start(within: Computation, loop: Instruction, counter: int) -> int:
    """Returns the initial value of the counter, 0 if it is not a constant."""
    state = within.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
        return 0
    first = within.get(state.operands[counter])
    while first is not None and first.opcode in ("copy", "bitcast"):
        first = within.get(first.operands[0])
    return (first is not None and _constant(first)) or 0


def _step(body: Computation, counter: int) -> int:
    """Returns the increment of the counter per iteration, 1 if the text lacks it."""
    root = next(i for i in body.values() if i.is_root)
    following = body.get(root.operands[counter]) if root.opcode == "tuple" else None
    if following is None or following.opcode not in ("add", "subtract"):
        return 1
    steps = [_constant(body[name]) for name in following.operands if name in body]
    return next((step for step in steps if step), 1)
