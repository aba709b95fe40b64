"""Islands: scopes of a wider dtype than the program's, such as a Cholesky in float64.

Inside an island values are float64; whoever reads one outside reads it in the dtype that the
program declares, and the caller in the dtype that it asked for. Functions that an equation in an
island calls back, as a solver does, take and return the dtype of the island. Nothing else of
planning knows of islands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...policies import CastPolicy
from ..compat import body_of
from ..primitives.called_back import functions_of
from .basic_plans import in_dtype, keep
from .call_operands import cast_states
from .data import BIND, CallBack, EquationPlan, Keep, Place, ValueState, Want
from .reasons import Reason, ReasonCode
from .structural import PlansBodies


def in_island(at: Place) -> EquationPlan:
    """Returns the plan of an ordinary equation in an island: all of its floats are wide."""
    assert at.region.island is not None
    rule, _ = at.region.rule_of(at.name)
    if rule is CastPolicy.KEEP or at.foreign:
        return keep(at, Reason(ReasonCode.KEEP, f"no {at.region.island} form of {at.name}"))
    return in_dtype(at, at.region.island, Reason(ReasonCode.SCOPE, at.region.cause))


def outside(at: Place) -> Place:
    """Returns an equation where it stands, with operands from islands in their declared dtypes."""
    if at.region.island is not None:
        return at
    if not any([_is_wider(state, at.region.wide) for state in at.given]):
        return at
    given = tuple(
        ValueState(at.declared(v)) if _is_wider(state, at.region.wide) else state
        for v, state in zip(at.eqn.invars, at.given, strict=True)
    )
    return at._replace(given=given)


def _is_wider(state: ValueState, wide: np.dtype) -> bool:
    return state.dtype is not None and state.dtype.itemsize > wide.itemsize


def leaving(plan: EquationPlan, given: Sequence[ValueState]) -> EquationPlan:
    """Returns a plan that reads operands from islands in the dtypes that it was made for.

    Args:
        plan: The plan, made for operands in their declared dtypes.
        given: What is known of each operand.
    """
    operands = tuple(
        planned.dtype if asked is None and planned != state else asked
        for asked, planned, state in zip(plan.operands, plan.given, given, strict=True)
    )
    action = BIND if isinstance(plan.action, Keep) else plan.action
    return dataclasses.replace(plan, operands=operands, action=action)


def plan_called_back(planner: PlansBodies, at: Place) -> EquationPlan:
    """Plans an equation in an island: its functions take and return the dtype of the island.

    Args:
        planner: Plans the functions.
        at: The equation.
    """
    dtype = at.region.island
    assert dtype is not None
    if at.foreign:
        return keep(at, Reason(ReasonCode.KEEP, f"no {dtype} form of {at.name}"))
    plan = in_dtype(at, dtype, Reason(ReasonCode.SCOPE, at.region.cause))
    # The solution has the dtype of the right-hand side, and all functions take arrays like these.
    given = cast_states(at.given, plan.operands, at.region.wide)
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
