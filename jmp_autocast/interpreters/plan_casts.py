"""The planning rule of the program's own casts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..policies import FLOAT32
from .plan import Code, Demand, EquationPlan, Leaf, Reason, ValueState, float_dtype
from .plan_structural import structural_rule


@structural_rule("convert_element_type")
def _convert_element_type(planner, eqn, states, region, wanted):
    (state,), (var,) = states, eqn.invars
    source, target = float_dtype(var.aval), float_dtype(eqn.outvars[0].aval)
    cast = Reason(Code.USER_CAST, f"{var.aval.dtype} to {eqn.params['new_dtype']}")
    if source is None and target is None:
        bound = state.bound if state.known is None else abs(state.known)
        result = ValueState(None, known=state.known, bound=bound)
        return EquationPlan((None,), (result,), cast, keep=True)
    if source is None:
        assert target is not None
        return EquationPlan(
            (None,), (_of_number(var, target, state),), cast, moves_leaf=_is_exact(var), keep=True
        )
    as_declared = state.dtype == source
    if target is None:
        return EquationPlan((None,), (ValueState(None),), cast, keep=as_declared)
    if source == target:
        # Only the weak type changes: the value stays what it is.
        return EquationPlan(
            (None,),
            (state,),
            Reason(Code.LEAF if state.leaf else Code.STRUCTURAL, "no cast", (0,)),
            moves_leaf=state.leaf is not None,
            keep=as_declared,
        )
    if state.known is not None:
        result = ValueState(target, Leaf.LITERAL, state.known)
    else:
        result = ValueState(target, bound=state.bound, narrowed=target != FLOAT32)
    demand = Demand.FULL if target == FLOAT32 else Demand.LOW
    return EquationPlan(
        (target if state.dtype != target and region.low is not None else None,),
        (result,),
        cast,
        demands=(demand,),
        keep=as_declared,
    )


def _of_number(var: Any, target: np.dtype, state: ValueState) -> ValueState:
    """A cast of a bool or integer to float: a leaf, with the bound of its integers."""
    dtype = np.dtype(var.aval.dtype) if isinstance(var.aval.dtype, np.dtype) else None
    if dtype is None or dtype.kind not in "biu":
        return ValueState(target, narrowed=target != FLOAT32)
    if state.known is not None:
        return ValueState(target, Leaf.LITERAL, state.known)
    if dtype.itemsize == 1:
        return ValueState(target, Leaf.CONST)  # up to 256: exact in every float dtype
    return ValueState(target, Leaf.DATA, bound=np.inf if state.bound is None else state.bound)


def _is_exact(var: Any) -> bool:
    dtype = var.aval.dtype
    return isinstance(dtype, np.dtype) and dtype.kind in "biu" and dtype.itemsize == 1
