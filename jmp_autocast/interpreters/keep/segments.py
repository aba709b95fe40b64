"""Groups steps into segments, each one `jax.checkpoint`, and orders the program.

A segment is a connected group of cheap steps between contractions. It includes the contractions
that consume its recomputed values; so the result of a GELU before a matmul is not kept. The
backward pass never repeats a contraction of a segment, because no derivative inside the segment
reads its result.

The *level* of a step is the number of contractions and opaque steps before it. An *opaque* step is
never recomputed; see `graph.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .cut import Cut
from .graph import Graph, Step, StepKind, Value, has_order


@dataclasses.dataclass(frozen=True)
class Unit:
    """Steps that are emitted together: one segment, or one step outside of the segments.

    Args:
        steps: The steps, in program order. A step may be in several segments.
        inputs: The operands of a segment that its own steps do not compute.
        outputs: The results of a segment that are used outside of it.
        saved: The results inside a segment that are kept.
        is_segment: Whether the steps become one `jax.checkpoint`.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    saved: frozenset[Value] = frozenset()
    is_segment: bool = False


def units_of(graph: Graph, cut: Cut) -> list[Unit]:
    """Returns the units of a graph, in an order in which they can be emitted.

    Args:
        graph: The graph.
        cut: The values that are kept and recomputed.
    """
    # A path between two steps of one level contains no contraction and no opaque step, because
    # these raise the level. So the connected groups of a level are independent of each other, and
    # the order by level computes all operands before their consumers.
    groups = _connected([step for step in graph.steps if _may_join(step, cut)])
    segments = [group for group in groups if _gains(group, cut)]
    inside = {step for group in segments for step in group}
    units = [((group[0].level, 1, group[0].index), _segment(group, cut)) for group in segments]
    for step in graph.steps:
        if step not in inside:
            # Steps on stored values (`LEAF`, `FLOATING`) come first, because any step may consume
            # their results. Within a level, contractions and opaque steps come last.
            first = {StepKind.LEAF: -1, StepKind.FLOATING: -1, StepKind.CHEAP: 1}.get(step.kind, 2)
            level = -1 if first == -1 else step.level
            units.append(((level, first, step.index), Unit((step,))))
    return _used([unit for _, unit in sorted(units, key=lambda pair: pair[0])], graph)


def _may_join(step: Step, cut: Cut) -> bool:
    if step.kind is StepKind.CONTRACTION:
        return not cut.recomputed.isdisjoint(step.reads)
    return step.kind is StepKind.CHEAP


def _gains(group: Sequence[Step], cut: Cut) -> bool:
    """Returns whether a group keeps fewer bytes as a checkpoint than as plain steps."""
    # For a nonlinear step, JAX keeps a function of the operand and not the operand itself: 2 x for
    # a square, the result for an exponential. So a group with such a step becomes a segment even if
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
    # The `FLOATING` steps whose results the group consumes join the segment, so that its backward
    # pass computes them again.
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
        # The results of contractions have a higher level, and are left out: only later units
        # consume them.
        frozenset(v for v in made & cut.kept if v.level == group[0].level),
        is_segment=True,
    )


def _used(units: Sequence[Unit], graph: Graph) -> list[Unit]:
    """Removes segment outputs, and steps outside of segments, that no later unit consumes."""
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
            # Opaque steps stay even without a consumer, because they may be markers of other
            # libraries: K-FAC finds its losses by such markers.
            stays = has_order(step.eqn) or step.kind is StepKind.OPAQUE
            if needed.isdisjoint(step.results) and not stays:
                continue
            needed.update(step.values)
        found.append(unit)
    return found[::-1]
