"""Walks over a plan with the equation that produced each value, for reports and `tune`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..compat import JaxprEqn, scope_names
from ..plan.data import EquationPlan, Plan
from ..plan.reads import entering, follow, leaving
from ..primitives.structure import bodies

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
    origins = [None] * len(plan.jaxpr.invars) if inputs is None else inputs
    _walk(plan, origins, visits, plan.path, 0, 1)
    return visits


def equations_once(
    plan: Plan, seen: set[int] | None = None
) -> Iterator[tuple[Plan, JaxprEqn, EquationPlan]]:
    """Yields each equation with its jaxpr's plan and its own plan, after those in its bodies.

    A body that is called twice is visited once, unlike in `walk_plan`.

    Args:
        plan: The plan of a program.
        seen: The ids of the bodies visited so far.
    """
    seen = set() if seen is None else seen
    seen.add(id(plan))
    for eqn, equation in zip(plan.jaxpr.eqns, plan.equations, strict=True):
        for inner in equation.inner:
            if id(inner) not in seen:
                yield from equations_once(inner, seen)
        yield plan, eqn, equation


def _walk(
    plan: Plan,
    inputs: Sequence[Origin],
    visits: list[Visit],
    scope: tuple[str, ...],
    depth: int,
    times: int,
) -> list[Origin]:
    """Adds the visits of a jaxpr, and returns where its outputs come from."""

    def step(i: int, eqn: JaxprEqn, given: list[Origin]) -> list[Origin]:
        index, path, equation = len(visits), scope + scope_names(eqn), plan.equations[i]
        visit = Visit(index, eqn, equation, path, depth, times, tuple(given))
        visits.append(visit)
        held = bodies(eqn) if equation.inner else ()
        outputs: list[Origin] = []
        for inner, body in zip(equation.inner, held, strict=True):
            # A body that is planned once and called 96 times is visited 96 times: reports have rows
            # for each call.
            given_inside = entering(body, given, index)
            more = times * body.repeats
            outputs = _walk(inner, given_inside, visits, path, depth + 1, more)
            pairs = zip(outputs, inner.output_dtypes, strict=True)
            outputs = [origin if cast is None else None for origin, cast in pairs]
        if held:
            visit.inner = len(visits) - index - 1
        results: list[Origin] = [index] * len(eqn.outvars)
        return leaving(held[0], outputs, index, len(results)) if len(held) == 1 else results

    return follow(plan.jaxpr, inputs, None, step)
