"""Walks over a plan with the equation that produced each value, for reports and `tune`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..compat import JaxprEqn, scope_names
from ..plan.data import EquationPlan, Plan
from ..plan.reads import entering, follow, leaving
from ..primitives.structure import bodies, innermost_first

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
        origins: The origin of each operand, also across the boundaries of calls and loops.
        inner: The number of visits inside it, which follow it. Set when the walk has left it.
    """

    index: int
    eqn: JaxprEqn
    plan: EquationPlan
    scope: tuple[str, ...]
    depth: int
    times: int
    origins: tuple[Origin, ...]
    inner: int = 0


def walk_plan(plan: Plan, inputs: Sequence[Origin] | None = None) -> list[Visit]:
    """Returns the equations of a plan in program order; those inside an equation follow it.

    An operand in a body may come from a visit outside, and a result from a visit inside. A carry of
    a loop and a result of a ``cond`` have several producers: the visit of the loop or ``cond``
    counts as their producer.

    Args:
        plan: The plan of the whole program.
        inputs: The origin of each of its inputs, such as its path in the arguments.
    """
    visits: list[Visit] = []

    def walk(
        plan: Plan, inputs: Sequence[Origin], scope: tuple[str, ...], depth: int, times: int
    ) -> list[Origin]:
        """Adds the visits of a jaxpr, and returns where its outputs come from."""

        def step(i: int, eqn: JaxprEqn, given: list[Origin]) -> list[Origin]:
            index, path, equation = len(visits), scope + scope_names(eqn), plan.equations[i]
            visit = Visit(index, eqn, equation, path, depth, times, tuple(given))
            visits.append(visit)
            results: list[Origin] = [index] * len(eqn.outvars)
            # A body that is planned once and called 96 times is visited 96 times: reports have rows
            # for each call. An equation that is kept has no plans of its bodies.
            for inner, body in zip(equation.inner, bodies(eqn), strict=False):
                given_inside = entering(body, given, index)
                outputs = walk(inner, given_inside, path, depth + 1, times * body.repeats)
                pairs = zip(outputs, inner.output_dtypes, strict=True)
                outputs = [origin if cast is None else None for origin, cast in pairs]
                if len(equation.inner) == 1:
                    results = leaving(body, outputs, index, len(results))
            visit.inner = len(visits) - index - 1
            return results

        return follow(plan.jaxpr, inputs, None, step)

    walk(plan, inputs or [None] * len(plan.jaxpr.invars), plan.path, 0, 1)
    return visits


def equations_once(plan: Plan) -> Iterator[tuple[Plan, JaxprEqn, EquationPlan, int]]:
    """Yields each equation with its jaxpr's plan, its own plan, and how often it runs.

    A body that is called twice is visited once, unlike in `walk_plan`.

    Args:
        plan: The plan of a program.
    """
    times = Counter({id(plan): 1})
    nested = innermost_first(plan, lambda p: [q for x in p.equations for q in x.inner])
    for outer, _ in reversed(nested):
        for eqn, equation in zip(outer.jaxpr.eqns, outer.equations, strict=True):
            yield outer, eqn, equation, times[id(outer)]
            for inner, body in zip(equation.inner, bodies(eqn), strict=False):
                times[id(inner)] += times[id(outer)] * body.repeats
