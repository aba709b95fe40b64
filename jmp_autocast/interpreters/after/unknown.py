"""Which primitives of a planned program no rule covers."""

from __future__ import annotations

from ...policies.registry import known_rule
from ..plan.data import Plan
from ..plan.planner import Planner
from ..plan.structural import planning_rule
from .walk import equations_once


def unknown_primitives(planner: Planner, plan: Plan) -> tuple[str, ...]:
    """Returns the primitives that no rule covers, in order of appearance.

    Args:
        planner: What planned the program.
        plan: The plan of the program, or of a derivative rule in it.
    """
    found: dict[str, None] = {}
    for body, eqn, _ in equations_once(plan):
        name, rule = eqn.primitive.name, planner.regions.at(body.path, eqn).rule
        if planning_rule(name) is None and known_rule(name, rule)[1] == "unknown":
            found[name] = None
    return tuple(found)
