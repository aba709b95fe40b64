"""Functions that a user's rule puts in place of calls, loops and casts.

For a primitive with a cast policy the rule is asked where the policy is: `equation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...policies import CastPolicy, Policy, apply_rule
from .basic_plans import emitted
from .data import EquationPlan, ValueState
from .equation_view import view_of
from .region import Region


def plan_emission(
    policy: Policy, eqn: Any, given: Sequence[ValueState], region: Region
) -> EquationPlan | None:
    """Returns the plan that calls a rule's function in place of an equation, None without one.

    ``full_precision()``, and scopes in float32, win over the rule: nothing is replaced there.

    Args:
        policy: The policy of the program.
        eqn: The equation.
        given: What is known of each operand.
        region: The precision of the scope that the equation is in.

    Raises:
        TypeError: The rule decided on a cast policy for a primitive that has none.
    """
    if region.compute_dtype is None or all(state.dtype is None for state in given):
        return None
    rule, origin = policy.rule_for(eqn.primitive.name, region.rules)
    if isinstance(rule, CastPolicy) or origin not in ("rules", "registered"):
        return None
    decision = apply_rule(rule, view_of(eqn, given, region.names, region.compute_dtype))
    if decision is None or decision.emit is not None:
        return None if decision is None else emitted(eqn, given, decision)
    raise TypeError(
        f"The rule for primitive {eqn.primitive.name!r} decided {decision.policy}, and the "
        "primitive has no cast policy: the equations inside it have. Return "
        "Decision(emit=function) to replace the equation, or None to leave it."
    )
