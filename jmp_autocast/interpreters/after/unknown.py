"""Which primitives of a planned program no rule covers."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan.data import Plan
from ..plan.planner import Planner
from ..plan.structural import planning_rule


def unknown_primitives(planner: Planner, plan: Plan) -> tuple[str, ...]:
    """Returns the primitives that no rule covers, in order of appearance.

    Args:
        planner: What planned the program.
        plan: The plan of the program, or of a derivative rule in it.
    """
    return tuple(dict.fromkeys(_unknown(planner, plan, set())))


def _unknown(planner: Planner, plan: Plan, seen: set[int]) -> Iterator[str]:
    seen.add(id(plan))
    for eqn, equation in zip(plan.jaxpr.eqns, plan.equations, strict=True):
        for inner in equation.inner:
            if id(inner) not in seen:
                yield from _unknown(planner, inner, seen)
        name = eqn.primitive.name
        # A rule of a scope may cover one that no rule of the whole program does, not the reverse.
        if planning_rule(name) is None and planner.policy.rule_for(name)[1] == "unknown":
            rules = planner.regions.at(plan.path, eqn).rules
            if planner.policy.rule_for(name, rules)[1] == "unknown":
                yield name
