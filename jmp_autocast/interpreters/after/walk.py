"""Walks over a plan with the provenance of each value, for reports, copies and `tune`.

Provenance is a fact that is propagated from the inputs of a jaxpr through its equations: the visit
that produced a value, the input that the value aliases, or whether it depends on parameters alone.
`follow`, `entering` and `leaving` propagate any such fact, into bodies and out of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..compat import AnyJaxpr, Atom, JaxprEqn, Literal, body_of, scope_names
from ..plan.data import EquationPlan, Plan
from ..primitives.structure import Body, bodies

V = TypeVar("V")
Origin: TypeAlias = int | str | None
"""Where a value comes from: the index of the visit that made it, or the path of an input of the
program, None for literals and constants."""


class Root(NamedTuple):
    """The input whose elements a value holds.

    Args:
        input: The position of the input.
        slices: The number of leading dimensions along which loops slice the input to get the value.
            None if the value holds only a part of the input or of such a slice.
        is_moved: Whether the dimensions of the value may differ from those of the input or slice.
    """

    input: int
    slices: int | None = 0
    is_moved: bool = False

    def sliced(self) -> Root:
        """Returns the root of the slice of this value that one iteration of a loop reads."""
        slices = None if self.is_moved or self.slices is None else self.slices + 1
        return self._replace(slices=slices)

    def moved(self, is_all: bool) -> Root:
        """Returns the root after a move of all elements of the value (``is_all``) or of some."""
        return Root(self.input, self.slices if is_all else None, True)


def follow(
    jaxpr: AnyJaxpr,
    inputs: Sequence[V],
    constant: V,
    step: Callable[[int, Any, list[V]], Sequence[V]],
) -> list[V]:
    """Returns where each output of a jaxpr comes from.

    Args:
        jaxpr: An open or closed jaxpr.
        inputs: Where each of its inputs comes from.
        constant: Where its constants and literals come from.
        step: Takes the index of an equation, the equation and where each operand comes from;
            returns where each result comes from.
    """
    body = body_of(jaxpr)
    found = dict.fromkeys(body.constvars, constant)
    found.update(zip(body.invars, inputs, strict=True))

    def of(atoms: Sequence[Atom]) -> list[V]:
        return [constant if isinstance(v, Literal) else found[v] for v in atoms]

    for i, eqn in enumerate(body.eqns):
        found.update(zip(eqn.outvars, step(i, eqn, of(eqn.invars)), strict=True))
    return of(body.outvars)


def entering(body: Body, given: Sequence[V], made: V) -> list[V]:
    """Returns the origin of each input of a body.

    Args:
        body: One of the bodies of an equation.
        given: The origin of each operand of the equation.
        made: The origin of carries, which the equation itself produces.
    """
    return [made if i in body.carried else given[k] for i, k in enumerate(body.operands)]


def leaving(body: Body, outputs: Sequence[V | None], made: V, count: int) -> list[V]:
    """Returns the origin of each result of an equation with one body.

    Args:
        body: Its body.
        outputs: The origin of each output of the body; None if the equation itself produces it.
        made: The origin of results that the equation itself produces, such as carries.
        count: The number of the equation's results.
    """
    found, carried = [made] * count, {output for _, output in body.carries}
    for k, (result, output) in enumerate(zip(body.results, outputs, strict=True)):
        if result is not None and output is not None and k not in carried:
            found[result] = output
    return found


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
