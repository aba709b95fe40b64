"""The dtypes in which PyTorch would return what a program computes.

Precision and type part ways in two places. What PyTorch does not list it computes in float32 and
rounds to the dtype of the operands (an ELU, a variance, an arc tangent); rounding here as well
would cost the readers digits. What it lists as float32 may stay in 16 bits where that loses
nothing to its readers (a power before a matmul). So such a value keeps the dtype that serves its
readers, and carries the other one for the caller who asks for the computed dtypes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policies import (
    CALLS,
    FLOAT32,
    FUNCTIONS_RETURNING_FLOAT32,
    FUNCTIONS_RETURNING_OPERAND_DTYPE,
    RETURNS_FLOAT32,
    RETURNS_OPERAND_DTYPE,
    STRUCTURAL,
)
from .compat import inner_jaxpr_key, jax_function
from .plan import CUSTOM_RULES, Code, EquationPlan, ValueState

# In 16 bits, were it not for its readers.
_RAISED = (Code.FEEDER, Code.LOG_GUARD)


def with_returned(
    origin: str, eqn: Any, plan: EquationPlan, states: Sequence[ValueState], low: np.dtype
) -> tuple[ValueState, ...]:
    """Returns an equation's results, each with the dtype in which PyTorch would return it.

    Args:
        origin: Where the rule of its primitive is from, as `Policy.rule_for` says.
        eqn: The equation.
        plan: Its plan.
        states: What is known of each operand.
        low: The compute dtype where the equation stands.
    """
    returned = _returned(origin, eqn, plan, states, low)
    if returned is None:
        return plan.results
    return tuple(
        dataclasses.replace(state, returned=None if returned == state.dtype else returned)
        if _is_free(state, v)
        else state
        for state, v in zip(plan.results, eqn.outvars, strict=True)
    )


def _is_free(state: ValueState, variable: Any) -> bool:
    """A value that is computed, and not in 16 bits because the program declares it so."""
    declared_low = state.dtype != FLOAT32 and variable.aval.dtype == state.dtype
    return state.dtype is not None and state.leaf is None and not declared_low


def _returned(
    origin: str, eqn: Any, plan: EquationPlan, states: Sequence[ValueState], low: np.dtype
) -> np.dtype | None:
    name = eqn.primitive.name
    if name in CALLS or name in CUSTOM_RULES:
        function = jax_function(eqn.params[inner_jaxpr_key(eqn.params)])
        if function in FUNCTIONS_RETURNING_FLOAT32:
            return FLOAT32
        follows = function in FUNCTIONS_RETURNING_OPERAND_DTYPE
    elif name in STRUCTURAL or origin != "default":
        return None
    elif name in RETURNS_FLOAT32:
        return FLOAT32
    elif plan.reason.code in _RAISED:
        return low
    else:
        follows = name in RETURNS_OPERAND_DTYPE or plan.reason.code is Code.PROMOTE_FULL
    return low if follows and _all_low(eqn, states, low) else None


def _all_low(eqn: Any, states: Sequence[ValueState], low: np.dtype) -> bool:
    """Whether PyTorch would have all operands in 16 bits; arrays outvote scalars there."""
    voters = [i for i, s in enumerate(states) if s.dtype is not None and s.known is None]
    voters = [i for i in voters if eqn.invars[i].aval.ndim] or voters
    return bool(voters) and all(low in (states[i].dtype, states[i].returned) for i in voters)
