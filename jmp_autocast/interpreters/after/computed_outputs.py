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
)
from ...policies.registry import known_rule
from ..compat import AnyJaxpr, Atom, JaxprEqn, aval_of, jax_function
from ..plan.avals import is_16_bit
from ..plan.data import EquationPlan, Plan, ReasonCode, Request, ValueState
from ..plan.needs import Need
from ..plan.planner import Planner
from ..plan.reads import follow
from ..primitives.reading import cast_dtype
from ..primitives.structure import called, is_call

# The dtype of a value in PyTorch; None if it equals the dtype in the plan.
_Other: TypeAlias = np.dtype | None

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
    consumed = [request._replace(needs=int(Need.LEADS)) for request in requests]
    plan = planner.plan_program(closed, inputs, consumed)
    found = zip(consumed, _follow(planner, plan, [None] * len(inputs)), plan.outputs, strict=True)
    dtypes = [(w, d or (s.dtype if is_16_bit(s.dtype) else None)) for w, d, s in found]
    # A float32 output is requested without the need of the assumed matmul. With this need, the
    # output would be computed in 16 bits, and then cast to float32.
    return [
        w if d is None else w._replace(dtype=d, needs=w.needs if is_16_bit(d) else 0)
        for w, d in dtypes
    ]


def _follow(planner: Planner, plan: Plan, inputs: Sequence[_Other]) -> list[_Other]:
    """Returns PyTorch's dtype of each output of a jaxpr; None if it equals the plan's dtype."""

    def step(i: int, eqn: JaxprEqn, given: list[_Other]) -> Sequence[_Other]:
        equation, results = plan.equations[i], [None] * len(eqn.outvars)
        if equation.inner and is_call(eqn):
            (inner,) = equation.inner
            entering = _cast(equation, given)
            pairs = zip(_follow(planner, inner, entering), inner.output_dtypes, strict=True)
            results = [other if cast is None else None for other, cast in pairs]
        elif _hands_on(eqn):
            results = given
        region = planner.regions.at(plan.path, eqn)
        if region.compute_dtype is None:
            return results
        _, origin = known_rule(eqn.primitive.name, region.rule)
        dtype = _torch_dtype(origin, eqn, equation, given, region.compute_dtype)
        if dtype is None:
            return results
        return [
            other if not _is_free(state, v) else None if dtype == state.dtype else dtype
            for other, state, v in zip(results, equation.results, eqn.outvars, strict=True)
        ]

    return follow(plan.jaxpr, inputs, None, step)


def _cast(plan: EquationPlan, given: Sequence[_Other]) -> list[_Other]:
    """Returns PyTorch's dtype of each input of a call's body; None if it equals the plan's dtype.

    If the plan casts a 16-bit operand of the call to float32, PyTorch passes it in 16 bits. PyTorch
    makes all other casts of the plan, too.
    """

    def inside(other: _Other, state: ValueState, cast: _Other) -> _Other:
        if cast is None:
            return other
        return (other or state.dtype) if cast == FLOAT32 and is_16_bit(state.dtype) else None

    return list(map(inside, given, plan.given, plan.operands))


def _hands_on(eqn: JaxprEqn) -> bool:
    """Whether an equation returns its operands, as a barrier or a cast to the same dtype does."""
    if eqn.primitive.name == "optimization_barrier":
        return len(eqn.invars) == len(eqn.outvars)  # JAX 0.12 returns no refs
    return cast_dtype(eqn) is not None and cast_dtype(eqn) == aval_of(eqn.invars[0]).dtype


def _is_free(state: ValueState, variable: Atom) -> bool:
    """Whether a value is computed, and the program itself does not declare it in 16 bits."""
    declared_low = state.dtype != FLOAT32 and aval_of(variable).dtype == state.dtype
    return state.is_computed and not declared_low


def _torch_dtype(
    origin: str, eqn: JaxprEqn, plan: EquationPlan, given: Sequence[_Other], compute_dtype: np.dtype
) -> _Other:
    """Returns PyTorch's dtype of an equation's result; None if it equals the plan's dtype.

    Args:
        origin: The origin of the primitive's rule, from `known_rule`.
        eqn: The equation.
        plan: Its plan.
        given: PyTorch's dtype of each operand; None if it equals the plan's dtype.
        compute_dtype: The compute dtype at the equation.
    """
    name, code = eqn.primitive.name, plan.reason.code
    # A call of one of JAX's own functions is identified by the name of the traced function.
    if is_call(eqn):
        function = jax_function(called(eqn))
        if function in FUNCTIONS_RETURNING_FLOAT32:
            return FLOAT32
        follows = function in FUNCTIONS_RETURNING_OPERAND_DTYPE
    elif origin != "default":
        return None
    elif name in RETURNS_FLOAT32:
        return FLOAT32
    elif code in _RAISED:
        return compute_dtype
    else:
        follows = name in RETURNS_OPERAND_DTYPE or code in _OF_OPERANDS
    return compute_dtype if follows and _all_low(eqn, plan.given, given, compute_dtype) else None


def _all_low(
    eqn: JaxprEqn, states: Sequence[ValueState], given: Sequence[_Other], compute_dtype: np.dtype
) -> bool:
    """Whether all operands that decide the dtype of a result in PyTorch would be in 16 bits."""
    # In PyTorch, a Python scalar never decides the dtype of a result. A 0-d array decides it only
    # if no operand has dimensions.
    voters = [i for i, s in enumerate(states) if s.dtype is not None and s.known_value is None]
    voters = [i for i in voters if aval_of(eqn.invars[i]).ndim] or voters
    return bool(voters) and all(compute_dtype in (states[i].dtype, given[i]) for i in voters)
