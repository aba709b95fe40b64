"""Which steps become one `jax.checkpoint`, and in which order everything is emitted.

A segment is a connected piece of cheap steps between contractions, with the contractions that
consume its recomputed values, so that the result of a GELU itself is not kept. A contraction in a
segment is never done twice, because no derivative in the segment has its result as an operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .cut import Cut
from .graph import Graph, Step, StepKind, Value, has_order


@dataclasses.dataclass(frozen=True)
class Unit:
    """Steps that are emitted together.

    Args:
        steps: The steps, in program order; those of a segment may be in other units, too.
        inputs: Their operands from other units.
        outputs: Their results with consumers in other units; for segments only.
        saved: Results in a segment that are kept.
        is_segment: They become one `jax.checkpoint`.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    saved: frozenset[Value] = frozenset()
    is_segment: bool = False


def units_of(graph: Graph, cut: Cut) -> list[Unit]:
    """Returns all steps of a graph in units, in an order in which they can be emitted.

    Args:
        graph: The graph.
        cut: Which of its values are kept.
    """
    # No way between two steps of one level leads through a contraction or an opaque step: those
    # raise the level. So the connected groups of a level are independent, and emitting level by
    # level computes all operands before their consumers.
    groups = _connected([step for step in graph.steps if _may_join(step, cut)])
    segments = [group for group in groups if _gains(group, cut)]
    inside = {step for group in segments for step in group}
    units = [((group[0].level, 1, group[0].index), _segment(group, cut)) for group in segments]
    for step in graph.steps:
        if step not in inside:
            # Leaves come first, because any step may consume them; steps that raise the level come
            # last.
            first = {StepKind.LEAF: -1, StepKind.FLOATING: -1, StepKind.CHEAP: 1}.get(step.kind, 2)
            level = -1 if first == -1 else step.level
            units.append(((level, first, step.index), Unit((step,))))
    return _used([unit for _, unit in sorted(units, key=lambda pair: pair[0])], graph)


def _may_join(step: Step, cut: Cut) -> bool:
    if step.kind is StepKind.CONTRACTION:
        return not cut.recomputed.isdisjoint(step.reads)
    return step.kind is StepKind.CHEAP


def _gains(group: Sequence[Step], cut: Cut) -> bool:
    """Returns whether a group keeps less as a checkpointed segment than JAX keeps for its steps."""
    # For steps other than products, JAX keeps a function of the operand instead of the operand: a
    # square keeps 2 x, an exponential its result. So a piece with such a step is a segment even if
    # the cut recomputes nothing in it (GPT scan on a TPU: 8 % fewer temporary bytes).
    return any(
        not cut.recomputed.isdisjoint(step.reads)
        or (step.reads and not step.words & {"linear", "bilinear"})
        for step in group
    )


def _connected(steps: Iterable[Step]) -> list[list[Step]]:
    """Groups the steps of one level that consume each other's results, in program order."""
    parent: dict[Step, Step] = {}

    def root(step: Step) -> Step:
        while parent[step] is not step:
            parent[step] = step = parent[parent[step]]
        return step

    for step in steps:
        parent[step] = step
        for v in step.values:
            if v.producer in parent and v.producer.level == step.level:
                parent[root(v.producer)] = root(step)
    groups: dict[Step, list[Step]] = {}
    for step in parent:
        groups.setdefault(root(step), []).append(step)
    return list(groups.values())


def _segment(group: Sequence[Step], cut: Cut) -> Unit:
    # Functions of stored values are computed in the segment, for the backward pass.
    steps = set(group)
    todo = [v.producer for step in group for v in step.values]
    while todo:
        step = todo.pop()
        if step is None or step.kind is not StepKind.FLOATING or step in steps:
            continue
        if not cut.kept.isdisjoint(step.results):
            continue
        steps.add(step)
        todo += [v.producer for v in step.values]
    ordered = sorted(steps, key=lambda step: step.index)
    made = {v for step in ordered for v in step.results}
    inputs = dict.fromkeys(v for step in ordered for v in step.values if v not in made)
    return Unit(
        tuple(ordered),
        tuple(inputs),
        tuple(v for step in group for v in step.results),
        # The result of a contraction has a name nowhere: its consumers are on the next level.
        frozenset(v for v in made & cut.kept if v.level == group[0].level),
        is_segment=True,
    )


def _used(units: Sequence[Unit], graph: Graph) -> list[Unit]:
    """Removes outputs of segments without a consumer, and steps that segments contain already."""
    needed = {v for v in graph.outputs if isinstance(v, Value)}
    found: list[Unit] = []
    for unit in reversed(units):
        if unit.is_segment:
            outputs = tuple(v for v in unit.outputs if v in needed)
            if not outputs:
                continue
            unit = dataclasses.replace(unit, outputs=outputs)
            needed.update(unit.inputs)
        else:
            (step,) = unit.steps
            # Marks of other libraries have no consumer: K-FAC finds its losses by them.
            stays = has_order(step.eqn) or step.kind is StepKind.OPAQUE
            if needed.isdisjoint(step.results) and not stays:
                continue
            needed.update(step.values)
        found.append(unit)
    return found[::-1]
