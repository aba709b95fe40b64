"""The dtypes in which PyTorch would return the outputs of a program.

The dtypes of a plan differ from PyTorch's in two cases. If PyTorch computes an unlisted op in
float32 and rounds the result to the dtype of the operands (an ELU, a variance, an arc tangent), the
plan may keep float32, so that consumers lose no digits. If PyTorch lists an op as float32, the plan
may keep 16 bits, if consumers lose nothing (a power before a matmul). This module finds PyTorch's
dtypes for a caller with ``output_dtype="computed"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ...policies import (
    FLOAT32,
    FUNCTIONS_RETURNING_FLOAT32,
    FUNCTIONS_RETURNING_OPERAND_DTYPE,
    RETURNS_FLOAT32,
    RETURNS_OPERAND_DTYPE,
    Rule,
)
from ...policies.registry import known_rule
from ..compat import AnyJaxpr, JaxprEqn, aval_of, jax_function
from ..plan.avals import is_16_bit
from ..plan.data import EquationPlan, Plan, ReasonCode, Request, ValueState
from ..plan.needs import NOTHING, Need
from ..plan.planner import Planner
from ..plan.reads import follow
from ..primitives.structure import called, is_call

# The dtype of a value in PyTorch; None if it is the dtype in the plan.
_Torch: TypeAlias = np.dtype | None

# Reasons that lie with the consumers of a float32 result. PyTorch would round the result.
_RAISED = (ReasonCode.FEEDER, ReasonCode.LOG_GUARD, ReasonCode.NO_PRODUCT)
_OF_OPERANDS = (ReasonCode.PROMOTE_FULL, ReasonCode.ACCUMULATOR)


def computed_requests(
    planner: Planner, closed: AnyJaxpr, inputs: Sequence[ValueState], requests: Sequence[Request]
) -> list[Request]:
    """Returns the requests with the dtypes in which PyTorch would return the program's outputs.

    PyTorch does not know the consumers of an output. So the program is planned as if a matmul
    consumed each output, because an output without such a consumer may stay in float32.

    Args:
        planner: The planner of the program.
        closed: The program.
        inputs: The state of each input.
        requests: The requests for the outputs before this call.
    """
    # At level "tensor_cores" the user has chosen float32: PyTorch's lists do not apply.
    if planner.policy.level == "tensor_cores":
        return list(requests)
    consumed = [request._replace(needs=Need.LEADS) for request in requests]
    plan = planner.plan_program(closed, inputs, consumed)
    found = zip(consumed, _follow(planner, plan, [None] * len(inputs)), plan.outputs, strict=True)
    # A 16-bit output is requested in float32 without the need of the assumed matmul. With this
    # need, the output would be computed in 16 bits, and then cast to float32.
    return [
        w
        if dtype in (None, state.dtype)
        else w._replace(dtype=dtype, needs=w.needs if is_16_bit(dtype) else NOTHING)
        for w, dtype, state in found
    ]


def _follow(planner: Planner, plan: Plan, inputs: Sequence[_Torch]) -> list[_Torch]:
    """Returns PyTorch's dtype of each output of a jaxpr; None for the plan's dtype."""

    def step(i: int, eqn: JaxprEqn, given: list[_Torch]) -> Sequence[_Torch]:
        equation, results = plan.equations[i], [None] * len(eqn.outvars)
        if equation.inner and is_call(eqn):
            # PyTorch does not cast the operands of a call.
            pairs = zip(given, equation.given, strict=True)
            (inner,) = equation.inner
            results = _follow(planner, inner, [dtype or s.dtype for dtype, s in pairs])
        region = planner.regions.at(plan.path, eqn)
        dtype = _torch_dtype(eqn, equation, given, region.rule, region.compute_dtype)
        if dtype is None:
            return results
        # PyTorch's dtype is that of a computed value, unless the program declares it in 16 bits.
        found = zip(results, equation.results, eqn.outvars, strict=True)
        return [
            dtype if s.is_computed and FLOAT32 in (s.dtype, aval_of(v).dtype) else d
            for d, s, v in found
        ]

    return follow(plan.jaxpr, inputs, None, step)


def _torch_dtype(
    eqn: JaxprEqn, plan: EquationPlan, given: Sequence[_Torch], rule: Rule | None, low: _Torch
) -> _Torch:
    """Returns PyTorch's dtype of an equation's result; None for the plan's dtype.

    Args:
        eqn: The equation.
        plan: Its plan.
        given: PyTorch's dtype of each operand; None for the plan's dtype.
        rule: The policy's rule for the equation, or None.
        low: The compute dtype of its scope; None if nothing is lowered there.
    """
    name, code = eqn.primitive.name, plan.reason.code
    # A call of one of JAX's own functions is identified by the name of the traced function.
    function = jax_function(called(eqn)) if is_call(eqn) else ""
    is_ruled = not function and known_rule(name, rule)[1] != "default"
    if low is None or is_ruled:
        return None
    if name in RETURNS_FLOAT32 or function in FUNCTIONS_RETURNING_FLOAT32:
        return FLOAT32
    follows = name in RETURNS_OPERAND_DTYPE or function in FUNCTIONS_RETURNING_OPERAND_DTYPE
    # In PyTorch, a Python scalar never decides the dtype of a result. A 0-d array decides it only
    # if no operand has dimensions.
    voters = [i for i, s in enumerate(plan.given) if s.dtype and s.known_value is None]
    voters = [i for i in voters if aval_of(eqn.invars[i]).ndim] or voters
    are_low = [low in (plan.given[i].dtype, given[i]) for i in voters]
    is_low = (follows or code in _OF_OPERANDS) and voters and all(are_low)
    return low if code in _RAISED or is_low else None
