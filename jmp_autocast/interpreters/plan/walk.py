"""The one walk over a plan: reports, links between rows and candidates of `tune` follow it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..compat import Literal, scope_names
from ..primitives.structure import Body, bodies
from .data import EquationPlan, Plan

Origin: TypeAlias = int | str | None
"""Where a value comes from: the index of the visit that made it, or the path of an input of the
program, None for literals and constants."""


@dataclasses.dataclass(slots=True)
class Visit:
    """One equation of a plan.

    Args:
        index: Its position among the visits.
        eqn: The equation.
        plan: Its plan.
        scope: The names of the enclosing scopes, outermost first.
        depth: The number of loops, branches and calls around it.
        times: How often it runs in one call of the program; a ``while`` counts once.
        origins: Where each operand comes from, also across the boundaries of calls and loops.
        inner: How many visits are inside it; they follow it. Known when the walk has left it.
        returned: Where the outputs of its inside come from: for each result of the equation, an
            origin for each body that makes it. Known when the walk has left it.
    """

    index: int
    eqn: Any
    plan: EquationPlan
    scope: tuple[str, ...]
    depth: int
    times: int
    origins: tuple[Origin, ...]
    inner: int = 0
    returned: tuple[tuple[Origin, ...], ...] = ()


def walk_plan(plan: Plan, inputs: Sequence[Origin] | None = None) -> list[Visit]:
    """Returns the equations of a plan in program order; those inside an equation follow it.

    What a call or a loop reads or stacks was made by the visit outside or inside; what a loop
    carries, or the branches of a ``cond`` return, has several makers and counts as made by the
    visit of the loop or ``cond``.

    Args:
        plan: The plan of the whole program.
        inputs: Where each of its inputs comes from, such as its path in the arguments.
    """
    return walk_with_outputs(plan, inputs)[0]


def walk_with_outputs(
    plan: Plan, inputs: Sequence[Origin] | None = None
) -> tuple[list[Visit], list[Origin]]:
    """Returns what `walk_plan` does, and where each output of the program comes from.

    Args:
        plan: The plan of the whole program.
        inputs: As for `walk_plan`.
    """
    visits: list[Visit] = []
    origins = [None] * len(plan.jaxpr.invars) if inputs is None else inputs
    outputs = _walk(plan, origins, visits, plan.path, 0, 1)
    return visits, outputs


def _walk(
    plan: Plan,
    inputs: Sequence[Origin],
    visits: list[Visit],
    scope: tuple[str, ...],
    depth: int,
    times: int,
) -> list[Origin]:
    """Adds the visits of a jaxpr, and returns where its outputs come from."""
    jaxpr = plan.jaxpr
    env: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars)
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def origin_of(atom: Any) -> Origin:
        return None if isinstance(atom, Literal) else env[atom]

    for eqn, equation in zip(jaxpr.eqns, plan.equations, strict=True):
        index, path = len(visits), scope + scope_names(eqn)
        given = tuple(map(origin_of, eqn.invars))
        visit = Visit(index, eqn, equation, path, depth, times, given)
        visits.append(visit)
        results: list[Origin] = [index] * len(eqn.outvars)
        made: list[list[Origin]] = []
        held = list(bodies(eqn)) if equation.inner else []
        for inner, body in zip(equation.inner, held, strict=True):
            # A body that is planned once and called 96 times is visited 96 times: rows are per
            # call.
            entering = _entering(body, equation, given, index)
            more = times * body.repeats
            made.append(_walk(inner, entering, visits, path, depth + 1, more))
        if made:
            visit.returned = _returned(held, made, len(eqn.outvars))
            visit.inner = len(visits) - index - 1
        if len(made) == len(held) == 1:
            carried = {output for _, output in held[0].carries}
            pairs = zip(made[0], equation.inner[0].output_dtypes, strict=True)
            for k, (origin, cast) in enumerate(pairs):
                result = held[0].results[k]
                # The equation itself makes what it carries or casts, and what is a constant.
                if k not in carried and result is not None and cast is None and origin is not None:
                    results[result] = origin
        env.update(zip(eqn.outvars, results, strict=True))
    return [origin_of(v) for v in jaxpr.outvars]


def _entering(
    body: Body, equation: EquationPlan, given: Sequence[Origin], index: int
) -> list[Origin]:
    """Returns where the inputs of a body come from; the equation makes what it carries or casts."""
    made = {i for i, k in enumerate(body.operands) if equation.operands[k] is not None}
    made = made.union(body.carried)
    return [index if i in made else given[k] for i, k in enumerate(body.operands)]


def _returned(
    held: Sequence[Body], made: Sequence[list[Origin]], count: int
) -> tuple[tuple[Origin, ...], ...]:
    """Returns, for each result of an equation, where each body that makes it has it from."""
    returned: list[list[Origin]] = [[] for _ in range(count)]
    for body, origins in zip(held, made, strict=True):
        for result, origin in zip(body.results, origins, strict=True):
            if result is not None:
                returned[result].append(origin)
    return tuple(map(tuple, returned))
