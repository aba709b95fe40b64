"""Which primitives of a planned program no rule covers."""

from __future__ import annotations

from ...policies.registry import known_rule
from ..compat import JaxprEqn
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
    return tuple(
        dict.fromkeys(
            eqn.primitive.name
            for body, eqn, _ in equations_once(plan)
            if _is_unknown(planner, body, eqn)
        )
    )


def _is_unknown(planner: Planner, body: Plan, eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if planning_rule(name) is not None:
        return False
    return known_rule(name, planner.regions.at(body.path, eqn).rule)[1] == "unknown"
