"""LOWER_PRECISION_FP: what runs on tensor cores, and who gets its float32 accumulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import FLOAT32, Policy
from ..primitives.reading import asked_precision, preferred_dtype
from ..primitives.traits import having
from .basic_plans import because, in_dtype, keep
from .data import BIND, Contract, Demand, EquationPlan, Keep, Reason, ReasonCode, ValueState, Want
from .region import Region
from .votes import literal_guard

_CONTRACTS = having("contracts")

_LOW = Reason(ReasonCode.LOWER_PRECISION)
_ASKED = Reason(ReasonCode.DOT_OUT, "a rule asks for float32")


def lower(
    eqn: Any, given: Sequence[ValueState], floats: Sequence[int], region: Region, guarded: bool
) -> EquationPlan:
    """Returns the plan in the compute dtype, unless the user or a value asks for float32.

    Args:
        eqn: The equation.
        given: What is known of each operand.
        floats: The positions of the float operands.
        region: Where it stands.
        guarded: A literal that the compute dtype cannot hold keeps the equation in float32; not so
            where the user's own rule lowers it.
    """
    compute_dtype = region.compute_dtype
    assert compute_dtype is not None
    contraction = eqn.primitive.name in _CONTRACTS
    # What exceeds bfloat16 makes a product exceed float32: weights are not searched for it.
    if guarded and (compute_dtype == np.float16 or not contraction):
        reason = literal_guard(given, floats, compute_dtype)
        if reason is not None:
            return in_dtype(eqn, given, floats, FLOAT32, reason)
    if not contraction:
        return in_dtype(eqn, given, floats, compute_dtype, _LOW)
    if (precision := asked_precision(eqn)) is not None:
        return keep(eqn, given, Reason(ReasonCode.USER_PRECISION, f"precision={precision}"))
    if floats[:2] != [0, 1]:
        return keep(eqn, given, Reason(ReasonCode.DOMAIN, "an operand is no float"))
    for i in floats[:2]:
        if (bound := given[i].integer_bound) is not None and bound > 1:
            reason = Reason(ReasonCode.COORD, f"operand {i} holds integers up to {bound:g}", (i,))
            return in_dtype(eqn, given, floats, FLOAT32, reason)
    plan = in_dtype(eqn, given, floats, compute_dtype, _LOW)
    # jnp.matmul records the dtype of its operands: float32 is a request only of 16-bit ones.
    declared_low = all(eqn.invars[i].aval.dtype == compute_dtype for i in floats)
    if preferred_dtype(eqn) == FLOAT32 and declared_low:
        results = tuple(ValueState(FLOAT32) for _ in plan.results)
        action = plan.action if isinstance(plan.action, Keep) else BIND
        return dataclasses.replace(plan, results=results, action=action)
    return plan


def accumulating(
    policy: Policy, plan: EquationPlan, eqn: Any, wants: tuple[Want, ...]
) -> EquationPlan:
    """Returns the plan of a contraction that hands out its accumulator.

    To the sources as their gradient, which devices add up; with ``dot_output="consumer"`` also as
    its result where float32 is wanted. By default not for convolutions: XLA's GPU backend computes
    one with a float32 result in float32.
    """
    name = eqn.primitive.name
    if name not in _CONTRACTS or not _is_rounded(plan):
        return plan
    if policy.dot_output == "compute":
        of_source = any(s.source is not None and s.dtype == FLOAT32 for s in plan.given[:2])
        accumulates = of_source and name != "conv_general_dilated"
        return dataclasses.replace(plan, action=Contract()) if accumulates else plan
    if any(want.demand is Demand.FULL for want in wants):
        return with_float32_result(plan, because(ReasonCode.DOT_OUT, wants[0]))
    return dataclasses.replace(plan, action=Contract())


def with_float32_result(plan: EquationPlan, reason: Reason = _ASKED) -> EquationPlan:
    """Returns the plan of a contraction whose result is its accumulator, where it is rounded."""
    if not _is_rounded(plan):
        return plan
    results = tuple(ValueState(FLOAT32) for _ in plan.results)
    return dataclasses.replace(plan, results=results, reason=reason, action=Contract())


def _is_rounded(plan: EquationPlan) -> bool:
    """Whether autocast lowers the equation, and so rounds its result to 16 bits."""
    lowered = plan.reason is _LOW and not isinstance(plan.action, Keep)
    return lowered and plan.results[0].dtype != FLOAT32
