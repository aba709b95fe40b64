"""The plan of an ordinary equation: its cast policy, and the votes of its operands, decide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ...policies import (
    DATA_MOVEMENT,
    FLOAT32,
    FULL_POLICIES,
    CastPolicy,
    Decision,
    Policy,
    apply_rule,
    domain,
)
from ...policies.registry import check_obeyed
from ..compat import is_array_aval
from ..primitives import reading
from ..primitives.traits import having
from ..regions import Region
from .basic_plans import (
    cast_results,
    emitted,
    folded,
    in_dtype,
    in_precision,
    keep,
    move_source,
    without_floats,
)
from .data import BIND, Contract, Demand, EquationPlan, Keep, Source, ValueState, Want
from .equation_view import check_domain, view_of
from .islands import in_island
from .reasons import Reason, ReasonCode
from .region import Place
from .symbolic_sizes import at_least, element_count
from .value_facts import fold
from .votes import far_literal, freshness, is_harmless, literal_guard, starts_stream, voters

_CONTRACTS = having("contracts")
_REDISPATCHED = having("redispatch")
_SATURATES = having("saturates")
_SELECTS = having("affine") & having("rounds")  # elements of the operands, or their negatives

# Matrix units multiply and add up float32 in float32: a float32 product has no wider accumulator.
_ACCUMULATOR = FLOAT32

_LOW = Reason(ReasonCode.LOWER_PRECISION)
_FULL = Reason(ReasonCode.FP32)
_KEEP = Reason(ReasonCode.KEEP, "policy KEEP")
_ASKED = Reason(ReasonCode.DOT_OUT, "a rule asks for float32")
_ACCUMULATES = Reason(ReasonCode.ACCUMULATOR, "added to, or multiplied, again and again")
_ROWS = Reason(ReasonCode.PROMOTE_LOW, "rows of a parameter")
_TENSOR_CORES = Reason(ReasonCode.PROMOTE_FULL, "level='tensor_cores'")
_PLAIN = {policy: Decision(policy=policy) for policy in CastPolicy}


def plan_equation(policy: Policy, at: Place) -> EquationPlan:
    """Plans one equation whose primitive has a cast policy.

    Args:
        policy: The policy of the program.
        at: The equation, and what is known and asked where it stands.

    Returns:
        The plan of the equation.
    """
    return in_precision(at, _plan_in_dtypes(policy, at), at.region.precision)


def _plan_in_dtypes(policy: Policy, at: Place) -> EquationPlan:
    """Returns the plan of an equation, with the precision of its product if a rule says one."""
    name, floats, compute_dtype = at.name, at.floats, at.region.compute_dtype
    if not floats:
        return without_floats(at)
    # A weight is moved in its own dtype and cast where it is read: whether anyone reads it in 16
    # bits is not known yet, and the 16-bit copy can be moved instead of it.
    if name in DATA_MOVEMENT and len(floats) == 1 and at.given[floats[0]].source is not None:
        return move_source(at, floats[0])
    if at.region.island is not None:
        return in_island(policy, at, not any(is_outside(v, at) for v in at.eqn.invars))
    if compute_dtype is None:
        return keep(at, Reason(ReasonCode.SCOPE, at.region.cause))
    if policy.rule_for(name, at.region.rules)[1] == "unknown":
        return keep(at, Reason(ReasonCode.UNKNOWN, name))
    # float64 was asked for by somebody who needs its digits, float8 by somebody with scales of
    # their own, and float16 in a bfloat16 program by somebody who knows its range: none of them is
    # ours.
    if outside := tuple([i for i, v in enumerate(at.eqn.invars) if is_outside(v, at)]):
        return keep(at, Reason(ReasonCode.DOMAIN, "an operand has another float dtype", outside))
    if name in _REDISPATCHED and not reading.has_plain_update(at.eqn):
        return keep(at, Reason(ReasonCode.KEEP, "the update computation is the user's"))
    # `x / sqrt(64)` is traced as a literal under a square root. Unfolded, the root would be a
    # float32 value that votes, and would raise the scores of every attention.
    known = fold(name, at.given, at.wide) if len(floats) == len(at.given) else None
    if known is not None and all(s.dtype == at.wide for s in at.given):
        return folded(at, known)
    # From here on the rule of the primitive decides; guards and demands are its own concern.
    decision, origin = _decision(policy, at)
    if decision.emit is not None:
        return emitted(at, decision)
    if decision.policy is CastPolicy.KEEP:
        plan = keep(at, _KEEP)
    elif decision.policy is CastPolicy.LOWER_PRECISION_FP:
        low = _lower(policy, at, guarded=origin != "rules")
        plan = _accumulating(policy, at, low)
        if at.region.product is not None and name in _CONTRACTS and _is_rounded(low):
            plan = cast_results(plan, decision)
            return at.region.product(at, plan, _contract(policy).of_sources)
    elif decision.policy is CastPolicy.FP32_APPEND_DTYPE and name in _CONTRACTS:
        plan = _with_float32_result(policy, _lower(policy, at, guarded=True), _ASKED)
    elif decision.policy in FULL_POLICIES:
        plan = in_dtype(at, at.wide, _FULL)
        is_sum = decision.policy is CastPolicy.FP32_SET_OPT_DTYPE
        if is_sum and at.given[floats[0]].narrowed_by_user:
            # jnp.sum(x, dtype=bfloat16) casts its operand: the user set the dtype.
            decision = Decision(policy=decision.policy, output_dtype=compute_dtype)
    else:
        plan = _promote(policy, at)
    return in_precision(at, cast_results(plan, decision), decision.precision)


def _decision(policy: Policy, at: Place) -> tuple[Decision, str]:
    """Returns what the rule of an equation decides, and where the rule is from."""
    rule, origin = policy.rule_for(at.name, at.region.rules)
    if isinstance(rule, CastPolicy):
        return _PLAIN[rule], origin
    assert at.region.compute_dtype is not None
    view = view_of(at.eqn, at.given, at.region.names, at.region.compute_dtype)
    decision = apply_rule(rule, view)
    check_domain(decision, at)
    if decision.policy is not None:
        check_obeyed(at.name, decision.policy)
    return decision, origin


def is_outside(v: Any, at: Place) -> bool:
    """Returns whether a value is a float or complex array that autocast never touches.

    Args:
        v: The variable or literal.
        at: The equation that reads it.
    """
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or dtype in _ours(at.region) or not is_array_aval(v.aval):
        return False
    return np.dtype(dtype).kind in "fcV" if isinstance(dtype, np.dtype) else False


def _ours(region: Region) -> Collection[np.dtype]:
    """Returns the dtypes that autocast casts in a region."""
    if region.island is not None:
        return domain(region.wide) | {region.island}
    assert region.compute_dtype is not None
    return (region.wide, region.compute_dtype)


def _because(code: ReasonCode, want: Want) -> Reason:
    return Reason(code, f"read by {want.reader}")


# --- LOWER_PRECISION_FP ---------------------------------------------------------------------


def _lower(policy: Policy, at: Place, guarded: bool) -> EquationPlan:
    """Returns the plan in the compute dtype, unless the user or a value asks for float32.

    Args:
        policy: The policy of the program.
        at: The equation.
        guarded: A literal that the compute dtype cannot hold, or positions, keep the equation in
            float32; not so where the user's own rule lowers it.
    """
    compute_dtype, floats = at.region.compute_dtype, at.floats
    assert compute_dtype is not None
    contracts = at.name in _CONTRACTS
    # What exceeds bfloat16 (3.4e38, as float32) makes a product exceed float32: weights are not
    # searched for it. float16 ends at 65,504.
    if guarded and (compute_dtype == np.float16 or not contracts):
        reason = literal_guard(at.given, floats, compute_dtype)
        if reason is not None:
            return in_dtype(at, at.wide, reason)
    if not contracts:
        return in_dtype(at, compute_dtype, _LOW)
    if (precision := reading.asked_precision(at.eqn)) is not None:
        return keep(at, Reason(ReasonCode.USER_PRECISION, f"precision={precision}"))
    if floats[:2] != [0, 1]:
        return keep(at, Reason(ReasonCode.DOMAIN, "an operand is no float"))
    if at.declared(at.eqn.outvars[0]) is None:
        return keep(at, Reason(ReasonCode.DOMAIN, "the result has another dtype"))
    if guarded and _is_product_of_elements(at):
        return _promote(policy, at)
    for i in floats[:2] if guarded else ():
        # An angle is a position times a frequency. Even a position that bfloat16 holds exactly,
        # 255, gives an angle that is rounded by half a radian.
        if (bound := at.given[i].integer_bound) is not None and _holds_positions(at, bound):
            reason = Reason(ReasonCode.COORD, f"operand {i} holds integers up to {bound:g}", (i,))
            return in_dtype(at, at.wide, reason)
    # XLA multiplies 16-bit operands exactly and adds in float32 on every backend; what is lost is
    # the rounding of the operands, 2**-9 of each in bfloat16, and of the result.
    plan = in_dtype(at, compute_dtype, _LOW, freshness=2)
    # jnp.matmul records the dtype of its operands: the wide one is a request only of others.
    declared_low = all(at.eqn.invars[i].aval.dtype == compute_dtype for i in floats)
    if reading.preferred_dtype(at.eqn) == at.wide and declared_low:
        results = tuple(ValueState(at.wide) for _ in plan.results)
        action = plan.action if isinstance(plan.action, Keep) else BIND
        return dataclasses.replace(plan, results=results, action=action)
    return plan


def _is_product_of_elements(at: Place) -> bool:
    """Whether a contraction sums nothing and makes more than it reads: `einsum("t,d->td")`.

    There is nothing for a matrix unit to add up, and the products are what a `mul` would make:
    angles of positions, where rounding a position of 1,000 turns the angle by 2 radians.
    """
    result = element_count(at.eqn.outvars[0])
    grows = not any(at_least(element_count(v), result) for v in at.eqn.invars[:2])
    depth = reading.reduction_depth(at.eqn)
    return grows and at_least(1, depth) and at_least(depth, 1)


def _holds_positions(at: Place, bound: float) -> bool:
    """Whether integers up to a bound, of which a contraction sums products, are positions.

    Those that are counted in the program are. Integers from outside are where at most three are
    summed (x, y, z): more are a mask, one-hot rows, an adjacency or a weight.
    """
    if bound == math.inf:
        return at_least(3, reading.reduction_depth(at.eqn))
    return bound > 1


def _accumulating(policy: Policy, at: Place, plan: EquationPlan) -> EquationPlan:
    """Returns the plan of a contraction that hands out its accumulator.

    To the sources as their gradient, which devices add up; with ``dot_output="consumer"`` also as
    its result where float32 is wanted. By default not for convolutions: XLA's GPU backend computes
    one with a float32 result in float32.
    """
    if at.name not in _CONTRACTS or not _is_rounded(plan):
        return plan
    # The gradient of a weight is a sum over a batch on many devices. Rounded before it is added up
    # there, it loses what differs between them: 257 becomes 256 in bfloat16.
    # ``weight_gradients="compute"`` takes that loss for half the bytes between the devices.
    action = _contract(policy)
    if policy.dot_output == "compute":
        of_source = action.of_sources and any(
            s.source is not None and s.dtype == at.wide for s in at.given[:2]
        )
        accumulates = of_source and at.name != "conv_general_dilated"
        return dataclasses.replace(plan, action=action) if accumulates else plan
    if any(want.demand is Demand.FULL for want in at.wants):
        return _with_float32_result(policy, plan, _because(ReasonCode.DOT_OUT, at.wants[0]))
    return dataclasses.replace(plan, action=action)


def _contract(policy: Policy) -> Contract:
    return Contract(of_sources=policy.weight_gradients == "float32")


def _with_float32_result(policy: Policy, plan: EquationPlan, reason: Reason) -> EquationPlan:
    """Returns the plan of a contraction whose result is its accumulator, where it is rounded."""
    if not _is_rounded(plan):
        return plan
    results = tuple(ValueState(_ACCUMULATOR) for _ in plan.results)
    return dataclasses.replace(plan, results=results, reason=reason, action=_contract(policy))


def _is_rounded(plan: EquationPlan) -> bool:
    """Whether autocast lowers the equation, and so rounds its result to 16 bits."""
    lowered = plan.reason is _LOW and not isinstance(plan.action, Keep)
    return lowered and plan.results[0].dtype != _ACCUMULATOR


# --- PROMOTE --------------------------------------------------------------------------------


def _promote(policy: Policy, at: Place) -> EquationPlan:
    """Returns the plan in the widest dtype among the operands that vote."""
    compute_dtype, floats = at.region.compute_dtype, at.floats
    assert compute_dtype is not None
    if at.accumulates and not policy.data_abstains:
        return in_dtype(at, at.wide, _ACCUMULATES)
    # The readers come first: a value that all of them read in another dtype would be cast for each,
    # and what the cast loses in 16 bits is lost to a reader that has the digits to use it.
    for want in at.wants:
        if want.demand is Demand.FULL:
            code = ReasonCode.LOG_GUARD if at.name in _SATURATES else ReasonCode.FEEDER
            return in_dtype(at, at.wide, _because(code, want))
        if want.demand is Demand.LOW and literal_guard(at.given, floats, compute_dtype) is None:
            return in_dtype(at, compute_dtype, _because(ReasonCode.CLEAR_NARROW, want))
    # Nobody asked, or it cannot follow: the widest voter decides, as in PyTorch and NumPy.
    votes = voters(policy, compute_dtype, at.eqn, at.given, floats)
    if not votes:
        # What a literal takes out of the range of 16 bits is computed: no cast may follow.
        reason = literal_guard(at.given, floats, compute_dtype)
        if reason is not None:
            return in_dtype(at, at.wide, reason)
        # With `dtype=` by hand a residual stream is 16 bits from the embedding on.
        if policy.data_abstains and starts_stream(at.name, at.given, floats):
            return in_dtype(at, compute_dtype, _ROWS)
        return _of_sources(at, floats)
    # A value that the program itself declares in 16 bits stays there, at every level.
    declared_full = any(at.eqn.invars[i].aval.dtype == at.wide for i in votes)
    if policy.level == "tensor_cores" and declared_full and at.name not in DATA_MOVEMENT:
        return in_dtype(at, at.wide, _TENSOR_CORES)
    target = _common_dtype(at, votes)
    if target == at.wide:
        by = next((i for i in votes if at.given[i].dtype == at.wide), votes[0])
        source = at.given[by].source
        what = "computed" if source is None else f"a {source.value} source"
        cause = f"operand {by} is {target}, {what}"
        return in_dtype(at, target, Reason(ReasonCode.PROMOTE_FULL, cause, (by,)))
    reason = literal_guard(at.given, floats, target)
    if reason is None and not policy.data_abstains:
        reason = far_literal(at.name, at.given, floats, target)
    if reason is not None:
        return in_dtype(at, at.wide, reason)
    cause = f"operand{'s' * (len(votes) > 1)} {', '.join(map(str, votes))}"
    low = Reason(ReasonCode.PROMOTE_LOW, cause, tuple(votes))
    return in_dtype(at, target, low, freshness(at.eqn, at.given, floats))


def _common_dtype(at: Place, positions: Sequence[int]) -> np.dtype:
    """Returns the one dtype of some operands, the wide one where they differ."""
    dtypes = {at.given[i].dtype for i in positions}
    dtype = dtypes.pop() if len(dtypes) == 1 else at.wide
    assert dtype is not None
    return dtype


def _of_sources(at: Place, floats: Sequence[int]) -> EquationPlan:
    """What is made of sources alone is a source: it waits in its own dtype for who uses it."""
    # The most demanding kind wins: data votes, a parameter has a gradient, a constant has neither.
    kinds = {at.given[i].source for i in floats}
    order = (Source.DATA, Source.PARAM, Source.CONST)
    source = next((kind for kind in order if kind in kinds), Source.CONST)
    reason = Reason(ReasonCode.SOURCE, f"of {source.value} sources", tuple(floats))
    plan = in_dtype(at, _common_dtype(at, floats), reason)
    # One of small numbers is a small number: `where(mask, 1.0, 0.0)`.
    harmless = at.name in _SELECTS and all(is_harmless(at.given[i]) for i in floats)
    tags = [s.tag for s in at.given if s.tag is not None and source is Source.PARAM]
    tag = tags[0].moved(is_whole=False) if tags else None
    results = tuple(
        ValueState(
            s.dtype,
            source,
            integer_bound=s.integer_bound,
            may_be_rounded=harmless,
            tag=tag,
        )
        if s.dtype is not None
        else s
        for s in plan.results
    )
    return dataclasses.replace(plan, results=results)
