"""The plan of an ordinary equation: its cast policy, and the votes of its operands, decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...policies import (
    DATA_MOVEMENT,
    FLOAT32,
    FULL_POLICIES,
    CastPolicy,
    Decision,
    Policy,
    apply_rule,
)
from ..compat import is_array_aval
from ..primitives.reading import has_plain_update
from ..primitives.traits import having
from .basic_plans import (
    cast_results,
    emitted,
    folded,
    in_dtype,
    keep,
    move_source,
    without_floats,
)
from .data import EquationPlan, Reason, ReasonCode, ValueState, Want
from .equation_view import view_of
from .low_precision import accumulating, lower, with_float32_result
from .promote import promote
from .region import Region
from .value_facts import fold

_CONTRACTS = having("contracts")
_REDISPATCHED = having("redispatch")

_FULL = Reason(ReasonCode.FP32)
_KEEP = Reason(ReasonCode.KEEP, "policy KEEP")
_PLAIN = {policy: Decision(policy=policy) for policy in CastPolicy}


class HasPolicy(Protocol):
    """What a planning rule needs of the planner."""

    policy: Policy


def plan_equation(
    planner: HasPolicy,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...] = (),
) -> EquationPlan:
    """Plans one equation whose primitive has a cast policy.

    Args:
        planner: Holds the policy of the program.
        eqn: The equation.
        given: What is known of each operand.
        region: The precision of the scope that the equation is in.
        wants: What the readers of each result ask for; empty if no sweep said.

    Returns:
        The plan of the equation.
    """
    name, compute_dtype = eqn.primitive.name, region.compute_dtype
    _, origin = planner.policy.rule_for(name, region.rules)
    floats = [i for i, state in enumerate(given) if state.dtype is not None]
    if not floats:
        return without_floats(eqn, given)
    if name in DATA_MOVEMENT and len(floats) == 1 and given[floats[0]].source is not None:
        return move_source(eqn, given, floats[0])
    if compute_dtype is None:
        return keep(eqn, given, Reason(ReasonCode.SCOPE, region.cause))
    if origin == "unknown":
        return keep(eqn, given, Reason(ReasonCode.UNKNOWN, name))
    if outside := tuple([i for i, v in enumerate(eqn.invars) if _outside(v.aval, compute_dtype)]):
        cause = "an operand has another float dtype"
        return keep(eqn, given, Reason(ReasonCode.DOMAIN, cause, outside))
    if name in _REDISPATCHED and not has_plain_update(eqn):
        return keep(eqn, given, Reason(ReasonCode.KEEP, "the update computation is the user's"))
    known = fold(name, [given[i] for i in floats]) if len(floats) == len(given) else None
    if known is not None and all(s.dtype == FLOAT32 for s in given):
        return folded(eqn, given, floats, known)
    decision, origin = _decision(planner.policy, eqn, given, region)
    if decision.emit is not None:
        return emitted(eqn, given, decision)
    if decision.policy is CastPolicy.KEEP:
        plan = keep(eqn, given, _KEEP)
    elif decision.policy is CastPolicy.LOWER_PRECISION_FP:
        plan = lower(eqn, given, floats, region, guarded=origin != "rules")
        plan = accumulating(planner.policy, plan, eqn, wants)
    elif decision.policy is CastPolicy.FP32_APPEND_DTYPE and name in _CONTRACTS:
        plan = lower(eqn, given, floats, region, guarded=True)
        plan = with_float32_result(plan)
    elif decision.policy in FULL_POLICIES:
        plan = in_dtype(eqn, given, floats, FLOAT32, _FULL)
        by_user = decision.policy is CastPolicy.FP32_SET_OPT_DTYPE
        if by_user and given[floats[0]].narrowed_by_user:
            # jnp.sum(x, dtype=bfloat16) casts its operand: the user set the dtype.
            decision = Decision(policy=decision.policy, output_dtype=compute_dtype)
    else:
        plan = promote(planner.policy, eqn, given, floats, region, wants)
    return cast_results(plan, decision)


def _decision(
    policy: Policy, eqn: Any, given: Sequence[ValueState], region: Region
) -> tuple[Decision, str]:
    """Returns what the rule of an equation decides, and where the rule is from."""
    assert region.compute_dtype is not None
    for rule, origin in policy.rules_for(eqn.primitive.name, region.rules):
        if isinstance(rule, CastPolicy):
            return _PLAIN[rule], origin
        decision = apply_rule(rule, view_of(eqn, given, region.names, region.compute_dtype))
        if decision is not None:
            return decision, origin
    raise AssertionError("the last rule of a primitive is a policy")


def _outside(aval: Any, compute_dtype: np.dtype) -> bool:
    """Whether a value is a float or complex array that autocast never touches."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype in (FLOAT32, compute_dtype) or not is_array_aval(aval):
        return False
    return np.dtype(dtype).kind in "fcV" if isinstance(dtype, np.dtype) else False
