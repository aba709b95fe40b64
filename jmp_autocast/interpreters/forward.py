"""The forward sweep's rule for an ordinary equation: cast policy and votes decide its dtypes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

from ..policies import (
    CONTRACTIONS,
    DATA_MOVEMENT,
    FLOAT32,
    FULL_POLICIES,
    CastPolicy,
    Decision,
    Policy,
    apply_rule,
)
from .backward import SATURATING
from .compat import is_array_aval
from .equation_view import view_of
from .guards import coordinate_bound, fold
from .plan import (
    FLOAT_DTYPES,
    Code,
    Demand,
    EquationPlan,
    Leaf,
    Reason,
    ValueState,
    Wanted,
    float_dtype,
)
from .sizes import largest_index
from .votes import REPLICATING, is_replicated, literal_guard, voters

if TYPE_CHECKING:
    from .planner import Planner, Region

# Their update computation is a parameter with fixed dtypes.
REDISPATCHED = frozenset(
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split()
)

_HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_LOW = Reason(Code.LOWER_PRECISION)
_FULL = Reason(Code.FP32)
_TENSOR_CORES = Reason(Code.PROMOTE_FULL, "level='tensor_cores'")
_NO_FLOAT = Reason(Code.NO_FLOAT)
_KEEP = Reason(Code.KEEP, "policy KEEP")
_NOTHING = ValueState(None)
_NO_PARAMS: Mapping[str, Any] = MappingProxyType({})
_PLAIN = {policy: Decision(policy=policy) for policy in CastPolicy}


def plan_equation(
    planner: Planner,
    eqn: Any,
    states: Sequence[ValueState],
    region: Region,
    wanted: tuple[Wanted, ...] = (),
) -> EquationPlan:
    """Plans one equation whose primitive has a cast policy.

    Args:
        planner: Holds the policy, and counts unknown primitives.
        eqn: The equation.
        states: What is known of each operand.
        region: The precision of the scope that the equation is in.
        wanted: What the users of each result ask for; empty if no sweep said.

    Returns:
        The plan of the equation.
    """
    name = eqn.primitive.name
    rule, origin = planner.policy.rule_for(name, region.rules)
    if origin == "unknown":
        planner.note_unknown(name)
    floats = [i for i, state in enumerate(states) if state.dtype is not None]
    if not floats:
        return _without_floats(eqn, states)
    if name in DATA_MOVEMENT and len(floats) == 1 and states[floats[0]].leaf is not None:
        return _move_leaf(eqn, states, floats[0])
    low = region.low
    if low is None:
        return keep(eqn, states, Reason(Code.SCOPE, region.cause))
    if origin == "unknown":
        return keep(eqn, states, Reason(Code.UNKNOWN, name))
    if outside := tuple([i for i, v in enumerate(eqn.invars) if _outside(v.aval, low)]):
        cause = "an operand has another float dtype"
        return keep(eqn, states, Reason(Code.DOMAIN, cause, outside))
    if name in REDISPATCHED and not _has_plain_update(eqn):
        return keep(eqn, states, Reason(Code.KEEP, "the update computation is the user's"))
    known = fold(name, [states[i] for i in floats]) if len(floats) == len(states) else None
    if known is not None and all(s.dtype == FLOAT32 for s in states):
        return _folded(eqn, states, floats, known)
    if isinstance(rule, CastPolicy):
        decision = _PLAIN[rule]
    else:
        decision = apply_rule(rule, view_of(eqn, states, region.names, low))
    if decision.policy is CastPolicy.KEEP:
        return _cast_results(keep(eqn, states, _KEEP), eqn, region, decision)
    if decision.policy is CastPolicy.LOWER_PRECISION_FP:
        plan = _lower(eqn, states, floats, region, guarded=origin != "rules")
        plan = _accumulating(planner.policy, plan, eqn, states, wanted)
    elif decision.policy in FULL_POLICIES:
        plan = _emit(eqn, states, floats, FLOAT32, region, _FULL)
        if decision.policy is CastPolicy.FP32_SET_OPT_DTYPE and states[floats[0]].narrowed:
            # jnp.sum(x, dtype=bfloat16) casts its operand: the user set the dtype.
            decision = Decision(policy=decision.policy, output_dtype=low)
    else:
        plan = _promote(planner.policy, eqn, states, floats, region, wanted)
    return _cast_results(plan, eqn, region, decision)


def keep(eqn: Any, states: Sequence[ValueState], reason: Reason) -> EquationPlan:
    """Returns the plan that hands the operands over in their declared dtypes."""
    operands = tuple(
        None if s.dtype is None or s.dtype == v.aval.dtype else v.aval.dtype
        for v, s in zip(eqn.invars, states, strict=True)
    )
    results = tuple(ValueState(float_dtype(v.aval)) for v in eqn.outvars)
    return EquationPlan(operands, results, reason, opaque=True, keep=not any(operands))


def _without_floats(eqn: Any, states: Sequence[ValueState]) -> EquationPlan:
    name = eqn.primitive.name
    bound = coordinate_bound(name, states, range(len(states))) if states else None
    if name == "iota":
        bound = largest_index(eqn.params["shape"][eqn.params["dimension"]])
    known = states[0].known if name in DATA_MOVEMENT and len(states) == 1 else None
    results = tuple(
        ValueState(dtype, Leaf.DATA if name == "iota" else None, bound=bound, known=known)
        if (dtype := float_dtype(v.aval)) or bound is not None or known is not None
        else _NOTHING
        for v in eqn.outvars
    )
    return EquationPlan((None,) * len(states), results, _NO_FLOAT, keep=True)


def _move_leaf(eqn: Any, states: Sequence[ValueState], i: int) -> EquationPlan:
    """Data movement of a leaf gives a leaf: it is cast, small, before it is moved."""
    state = states[i]
    assert state.leaf is not None
    # Rows looked up by data are activations: they vote when they are full size.
    leaf = Leaf.DATA if eqn.primitive.name == "gather" and state.leaf is Leaf.PARAM else state.leaf
    moved = dataclasses.replace(state, leaf=leaf)
    results = tuple(moved if float_dtype(v.aval) else _NOTHING for v in eqn.outvars)
    reason = Reason(Code.LEAF, f"data movement of a {state.leaf.value} leaf", (i,))
    return EquationPlan((None,) * len(states), results, reason, moves_leaf=True, keep=True)


def _folded(
    eqn: Any, states: Sequence[ValueState], floats: Sequence[int], known: float
) -> EquationPlan:
    plan = keep(eqn, states, Reason(Code.LEAF, "a literal", tuple(floats)))
    results = tuple(ValueState(s.dtype, Leaf.LITERAL, known) for s in plan.results)
    return EquationPlan(plan.operands, results, plan.reason, keep=plan.keep)


def _lower(
    eqn: Any, states: Sequence[ValueState], floats: Sequence[int], region: Region, guarded: bool
) -> EquationPlan:
    low = region.low
    assert low is not None
    contraction = eqn.primitive.name in CONTRACTIONS
    # What exceeds bfloat16 makes a product exceed float32: weights are not searched for it.
    if guarded and (low == np.float16 or not contraction):
        reason = literal_guard(states, floats, low)
        if reason is not None:
            return _emit(eqn, states, floats, FLOAT32, region, reason)
    if not contraction:
        return _emit(eqn, states, floats, low, region, _LOW)
    precision = eqn.params.get("precision")
    if precision == _HIGHEST or not (
        precision is None or isinstance(precision, tuple | lax.Precision)
    ):
        return keep(eqn, states, Reason(Code.USER_PRECISION, f"precision={precision}"))
    if floats[:2] != [0, 1]:
        return keep(eqn, states, Reason(Code.DOMAIN, "an operand is no float"))
    for i in floats[:2]:
        if (bound := states[i].bound) is not None and bound > 1:
            reason = Reason(Code.COORD, f"operand {i} holds integers up to {bound:g}", (i,))
            return _emit(eqn, states, floats, FLOAT32, region, reason)
    plan = _emit(eqn, states, floats, low, region, _LOW)
    # jnp.matmul records the dtype of its operands: float32 is a request only of 16-bit ones.
    preferred = eqn.params.get("preferred_element_type")
    if preferred == FLOAT32 and all(eqn.invars[i].aval.dtype == low for i in floats):
        results = tuple(ValueState(FLOAT32) for _ in plan.results)
        return dataclasses.replace(plan, results=results, params=_NO_PARAMS)
    return plan


def _accumulating(
    policy: Policy,
    plan: EquationPlan,
    eqn: Any,
    states: Sequence[ValueState],
    wanted: tuple[Wanted, ...],
) -> EquationPlan:
    """The plan of a contraction that hands out its accumulator.

    To the leaves as their gradient, which devices add up; with ``dot_output="consumer"`` also as
    its result where float32 is wanted. By default not for convolutions: XLA's GPU backend computes
    one with a float32 result in float32.
    """
    name = eqn.primitive.name
    rounded = plan.reason is _LOW and plan.results[0].dtype != FLOAT32 and not plan.keep
    if name not in CONTRACTIONS or not rounded:
        return plan
    if policy.dot_output == "compute":
        of_leaf = any(s.leaf is not None and s.dtype == FLOAT32 for s in states[:2])
        accumulates = of_leaf and name != "conv_general_dilated"
        return dataclasses.replace(plan, accumulates=accumulates)
    if any(want.demand is Demand.FULL for want in wanted):
        results = tuple(ValueState(FLOAT32) for _ in plan.results)
        reason = _because(Code.DOT_OUT, wanted[0])
        return dataclasses.replace(plan, results=results, reason=reason, accumulates=True)
    return dataclasses.replace(plan, accumulates=True)


def _because(code: Code, want: Wanted) -> Reason:
    return Reason(code, f"read by {want.reader}")


def _promote(
    policy: Policy,
    eqn: Any,
    states: Sequence[ValueState],
    floats: Sequence[int],
    region: Region,
    wanted: tuple[Wanted, ...],
) -> EquationPlan:
    low, name = region.low, eqn.primitive.name
    assert low is not None
    for want in wanted:
        if want.demand is Demand.FULL:
            code = Code.LOG_GUARD if name in SATURATING else Code.FEEDER
            return _emit(eqn, states, floats, FLOAT32, region, _because(code, want))
        if want.demand is Demand.LOW and literal_guard(states, floats, low) is None:
            return _emit(eqn, states, floats, low, region, _because(Code.CLEAR_NARROW, want))
    votes = voters(policy, eqn, states, floats)
    if not votes:
        # What a literal takes out of the range of 16 bits is computed: no cast may follow.
        reason = literal_guard(states, floats, low)
        if reason is not None:
            return _emit(eqn, states, floats, FLOAT32, region, reason)
        return _leaf_result(eqn, states, floats, region)
    declared_full = any(eqn.invars[i].aval.dtype == FLOAT32 for i in votes)
    if policy.level == "tensor_cores" and declared_full and name not in DATA_MOVEMENT:
        return _emit(eqn, states, floats, FLOAT32, region, _TENSOR_CORES)
    dtypes = {states[i].dtype for i in votes}
    target = dtypes.pop() if len(dtypes) == 1 else FLOAT32
    assert target is not None
    if target == FLOAT32:
        by = next((i for i in votes if states[i].dtype == FLOAT32), votes[0])
        return _emit(eqn, states, floats, target, region, _promote_full(states[by], by))
    reason = literal_guard(states, floats, target)
    if reason is not None:
        return _emit(eqn, states, floats, FLOAT32, region, reason)
    cause = f"operand{'s' * (len(votes) > 1)} {_listed(votes)}"
    reason = Reason(Code.PROMOTE_LOW, cause, tuple(votes))
    return _emit(eqn, states, floats, target, region, reason)


def _leaf_result(
    eqn: Any, states: Sequence[ValueState], floats: Sequence[int], region: Region
) -> EquationPlan:
    """What is made of leaves alone is a leaf: it waits in its own dtype for who uses it."""
    dtypes = {states[i].dtype for i in floats}
    target = dtypes.pop() if len(dtypes) == 1 else FLOAT32
    kinds = {states[i].leaf for i in floats}
    for leaf in (Leaf.DATA, Leaf.PARAM, Leaf.CONST):
        if leaf in kinds:
            break
    else:
        leaf = Leaf.CONST
    assert target is not None
    reason = Reason(Code.LEAF, f"of {leaf.value} leaves", tuple(floats))
    plan = _emit(eqn, states, floats, target, region, reason)
    results = tuple(
        ValueState(s.dtype, leaf, bound=s.bound) if s.dtype is not None else s for s in plan.results
    )
    return dataclasses.replace(plan, results=results)


def _emit(
    eqn: Any,
    states: Sequence[ValueState],
    floats: Sequence[int],
    target: np.dtype,
    region: Region,
    reason: Reason,
) -> EquationPlan:
    """Returns the plan in which all float operands are read in, and results are, ``target``."""
    operands: list[np.dtype | None] = [None] * len(states)
    for i in floats:
        if states[i].dtype != target:
            operands[i] = target
    bound = coordinate_bound(eqn.primitive.name, states, floats)
    unchanged = all(eqn.invars[i].aval.dtype == target for i in floats) and not any(operands)
    results = [
        # With its own operands an equation has its own results: a float32 statistic of a 16-bit
        # attention kernel, or the user's preferred_element_type.
        _computed(declared if unchanged else target, bound)
        if (declared := float_dtype(v.aval)) is not None
        else _NOTHING
        for v in eqn.outvars
    ]
    name = eqn.primitive.name
    replicates = ()
    if name in REPLICATING and target != FLOAT32 and not unchanged:
        replicates = tuple(i for i in floats if states[i].known is None and is_replicated(eqn, i))
    redispatch = name in REDISPATCHED and eqn.invars[0].aval.dtype != target
    params = _NO_PARAMS
    preferred = eqn.params.get("preferred_element_type")
    if not unchanged and preferred is not None and np.dtype(preferred) in FLOAT_DTYPES:
        params = {"preferred_element_type": target}
    return EquationPlan(
        tuple(operands),
        tuple(results),
        reason,
        params=params,
        replicates=replicates,
        redispatch=redispatch,
        keep=unchanged,
    )


@functools.lru_cache(1024)
def _computed(dtype: np.dtype, bound: float | None) -> ValueState:
    """One object for equal states: a program of many equations has few."""
    return ValueState(dtype, bound=bound)


def _cast_results(plan: EquationPlan, eqn: Any, region: Region, decision: Decision) -> EquationPlan:
    if decision.output_dtype is None:
        return plan
    dtype = np.dtype(decision.output_dtype)
    casts = tuple(dtype if s.dtype is not None and s.dtype != dtype else None for s in plan.results)
    results = tuple(ValueState(dtype) if s.dtype is not None else s for s in plan.results)
    keep = plan.keep and not any(casts)
    return dataclasses.replace(plan, casts=casts, results=results, keep=keep)


def _outside(aval: Any, low: np.dtype) -> bool:
    """True for a float or complex array that autocast never touches."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype in (FLOAT32, low) or not is_array_aval(aval):
        return False
    return np.dtype(dtype).kind in "fcV" if isinstance(dtype, np.dtype) else False


def _has_plain_update(eqn: Any) -> bool:
    """False for ``x.at[i].apply(fn)``: a scatter whose computation is ``fn``."""
    update = eqn.params.get("update_jaxpr")
    return eqn.primitive.name != "scatter" or update is None or not update.eqns


def _promote_full(state: ValueState, i: int) -> Reason:
    what = "computed" if state.leaf is None else f"a {state.leaf.value} leaf"
    return Reason(Code.PROMOTE_FULL, f"operand {i} is float32, {what}", (i,))


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
