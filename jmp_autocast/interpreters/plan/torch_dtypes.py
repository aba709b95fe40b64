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

from ...policies import (
    FUNCTIONS_RETURNING_FLOAT32,
    FUNCTIONS_RETURNING_OPERAND_DTYPE,
    RETURNS_FLOAT32,
    RETURNS_OPERAND_DTYPE,
)
from ..compat import jax_function
from ..primitives.structure import called, is_call
from .data import EquationPlan, ValueState
from .reasons import ReasonCode

# Float32 because the readers lose digits otherwise: PyTorch, which sees no readers, rounds these.
_RAISED = (ReasonCode.FEEDER, ReasonCode.LOG_GUARD)


def with_torch_dtypes(
    origin: str, eqn: Any, plan: EquationPlan, compute_dtype: np.dtype, wide: np.dtype
) -> EquationPlan:
    """Returns a plan whose results say in which dtype PyTorch would return each.

    Args:
        origin: Where the rule of the primitive is from, as `Policy.rule_for` says; "" for a
            primitive that has none.
        eqn: The equation.
        plan: Its plan.
        compute_dtype: The compute dtype where the equation stands.
        wide: The wide dtype of the policy, which stands for PyTorch's float32.
    """
    dtype = _torch_dtype(origin, eqn, plan, compute_dtype, wide)
    if dtype is None:
        return plan
    results = tuple(
        dataclasses.replace(state, torch_dtype=None if dtype == state.dtype else dtype)
        if _is_free(state, v, wide)
        else state
        for state, v in zip(plan.results, eqn.outvars, strict=True)
    )
    return dataclasses.replace(plan, results=results)


def _is_free(state: ValueState, variable: Any, wide: np.dtype) -> bool:
    """A value that is computed, and not in 16 bits because the program declares it so."""
    declared_low = state.dtype != wide and variable.aval.dtype == state.dtype
    return state.is_computed and not declared_low


def _torch_dtype(
    origin: str, eqn: Any, plan: EquationPlan, compute_dtype: np.dtype, wide: np.dtype
) -> np.dtype | None:
    name, code = eqn.primitive.name, plan.reason.code
    # JAX's own functions are known by the name of the function that they trace.
    if is_call(eqn):
        function = jax_function(called(eqn))
        if function in FUNCTIONS_RETURNING_FLOAT32:
            return wide
        follows = function in FUNCTIONS_RETURNING_OPERAND_DTYPE
    elif origin != "default":
        return None
    elif name in RETURNS_FLOAT32:
        return wide
    elif code in _RAISED:
        return compute_dtype
    else:
        follows = name in RETURNS_OPERAND_DTYPE or code is ReasonCode.PROMOTE_FULL
    return compute_dtype if follows and _all_low(eqn, plan.given, compute_dtype) else None


def _all_low(eqn: Any, given: Sequence[ValueState], compute_dtype: np.dtype) -> bool:
    """Whether PyTorch would have all operands in 16 bits; arrays outvote scalars there."""
    # A Python scalar has no dtype to vote with in PyTorch, and a 0-d array yields to any array.
    voters = [i for i, s in enumerate(given) if s.dtype is not None and s.known_value is None]
    voters = [i for i in voters if eqn.invars[i].aval.ndim] or voters
    return bool(voters) and all(
        compute_dtype in (given[i].dtype, given[i].torch_dtype) for i in voters
    )
