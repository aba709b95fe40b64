"""Plans of equations whose functions are called back: a solver in an island."""

from __future__ import annotations

import dataclasses

from ..compat import body_of
from ..primitives.called_back import functions_of
from .basic_plans import in_dtype, keep
from .call_operands import cast_states
from .data import CallBack, EquationPlan, Want
from .equation import is_outside
from .reasons import Reason, ReasonCode
from .region import Place
from .structural import PlansBodies


def plan_called_back(planner: PlansBodies, at: Place) -> EquationPlan:
    """Plans an equation in an island: its functions take and return the dtype of the island.

    Args:
        planner: Plans the functions.
        at: The equation.
    """
    dtype = at.region.island
    assert dtype is not None
    if any(is_outside(v, at) for v in at.eqn.invars):
        return keep(at, Reason(ReasonCode.KEEP, f"no {dtype} form of {at.name}"))
    plan = in_dtype(at, dtype, Reason(ReasonCode.SCOPE, at.region.cause))
    # The solution has the dtype of the right-hand side, and all functions take arrays like these.
    given = cast_states(at.given, plan.operands, at.wide)
    plans = tuple(
        planner.plan(
            body.jaxpr,
            [given[i] for i in body.operands],
            [Want(dtype=at.declared(v) and dtype) for v in body_of(body.jaxpr).outvars],
            at.region.names,
        )
        for body in functions_of(at.eqn)
    )
    return dataclasses.replace(plan, action=CallBack(plans))
