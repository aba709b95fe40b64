"""Plans an equation without bodies: by its cast policy, guards, requests and votes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...policies import (
    DATA_MOVEMENT,
    FLOAT32,
    FULL_POLICIES,
    CastPolicy,
    Decision,
    apply_rule,
)
from ...policies.registry import check_obeyed, known_rule
from ..compat import Atom, aval_of
from ..primitives import reading
from ..primitives.traits import DERIVATIVES, FOLDS, having
from .avals import at_least, is_16_bit, is_as_large
from .basic_plans import (
    cast_results,
    emitted,
    in_dtype,
    in_precision,
    keep,
    rounded_once,
    view_of,
)
from .consumers import chooses_in_float32, derivative_leaves, follows_consumers, raised_for
from .data import (
    BIND,
    KEEP,
    READ_BY,
    Bind,
    Context,
    Contract,
    EquationPlan,
    Keep,
    Move,
    Reason,
    ReasonCode,
    Source,
    ValueState,
)
from .marks import accumulates, is_stream
from .needs import EITHER, HARMED, OF_PRODUCTS, ROWS, Need, cannot_pay
from .votes import far_literal, is_harmless, literal_guard, starts_stream, voters

_CONTRACTS = having("contracts")
_KEEPS_ALL = having("whole")
_REDISPATCHED = having("redispatch")
_SATURATES = having("saturates")
_CLEARS = having("clears")
# Primitives whose results hold elements of their operands, perhaps negated.
_SELECTS = having("affine") & having("rounds")
_COMPUTES_NOTHING = _CONTRACTS | having("moves") | having("rounds")

_NO_FLOAT = Reason(ReasonCode.NO_FLOAT)
_LOW = Reason(ReasonCode.LOWER_PRECISION)
_FULL = Reason(ReasonCode.FP32)
_KEEP = Reason(ReasonCode.KEEP, "policy KEEP")
_REQUESTED = Reason(ReasonCode.DOT_OUT, "a rule asks for float32")
_ACCUMULATES = Reason(ReasonCode.ACCUMULATOR, "added to again and again")
_ROWS = Reason(ReasonCode.PROMOTE_LOW, "rows of a parameter")
_NO_PRODUCT = Reason(ReasonCode.NO_PRODUCT)
_READ_LOW = Reason(ReasonCode.CLEAR_NARROW, "all consumers read 16 bits")
_WHOLE = Reason(ReasonCode.COORD, "whole numbers that 16 bits may not hold")
_COUNTS = Reason(ReasonCode.DOT_OUT, "its result is whole numbers")
_TENSOR_CORES = Reason(ReasonCode.PROMOTE_FULL, "level='tensor_cores'")
_PLAIN = {policy: Decision(policy=policy) for policy in CastPolicy}


class Link(NamedTuple):
    """A step in a chain that plans an equation.

    Args:
        decides: Returns the plan of an equation, None to leave it to the next link.
        names: The primitives that it decides about, None for all.
    """

    decides: Callable[[Context], EquationPlan | None]
    names: Collection[str] | None = None


def plan_equation(ctx: Context) -> EquationPlan:
    """Plans an ordinary equation: the first of `DECISIONS` that has a plan decides.

    Args:
        ctx: The equation in its context.

    Returns:
        The plan of the equation.
    """
    plan = _first(DECISIONS, ctx)
    return in_precision(ctx, plan, ctx.region.precision)


def _first(chain: Sequence[Link], ctx: Context) -> Any:
    """Returns the plan of the first link that returns one, None if no link does."""
    for decides, names in chain:
        if (names is None or ctx.name in names) and (plan := decides(ctx)) is not None:
            return plan
    return None


# --- every equation -------------------------------------------------------------------------


def _has_no_floats(ctx: Context) -> EquationPlan | None:
    """Integers, bools and float8 arrays of the program are never cast; an `iota` is data."""
    if ctx.floats:
        return None
    source = Source.DATA if ctx.name == "iota" else None
    dtypes = map(ctx.declared, ctx.eqn.outvars)
    results = tuple(ValueState(dtype, dtype and source) for dtype in dtypes)
    return EquationPlan(KEEP, ctx.given, (None,) * len(ctx.given), results, _NO_FLOAT)


def _moves_a_source(ctx: Context) -> EquationPlan | None:
    """A move of a source returns a source of the same dtype, which each consumer casts."""
    if len(ctx.floats) != 1 or (state := ctx.given[ctx.floats[0]]).source is None:
        return None
    # Whether the result has 16-bit consumers is not known yet. For them the rewriter moves the
    # operand's 16-bit copy, which may be smaller than the result. Rows that a gather looks up in a
    # parameter are activations: they become data, so that they vote.
    is_lookup = ctx.name == "gather" and state.source is Source.PARAM
    moved = dataclasses.replace(
        state,
        source=Source.DATA if is_lookup else state.source,
        tag=None if is_lookup or state.tag is None else state.tag.moved(ctx.name in _KEEPS_ALL),
        is_looked_up=state.is_looked_up or is_lookup,
    )
    results = tuple(moved if ctx.declared(v) else ValueState(None) for v in ctx.eqn.outvars)
    cause = f"data movement of a {state.source.value} source"
    reason = Reason(ReasonCode.SOURCE, cause, tuple(ctx.floats))
    return EquationPlan(Move(), ctx.given, (None,) * len(ctx.given), results, reason)


def _stands_in_scope(ctx: Context) -> EquationPlan | None:
    """An equation keeps its dtypes in a scope of float32, such as ``full_precision()``."""
    if ctx.region.compute_dtype is not None:
        return None
    return keep(ctx, Reason(ReasonCode.SCOPE, ctx.region.cause))


def _is_not_ours(ctx: Context) -> EquationPlan | None:
    """Keeps equations on dtypes that autocast leaves alone, and scatters with a user's update."""
    # A user chooses float64 for its digits, float8 together with scales, and float16 in a bfloat16
    # program for values of a known range.
    if foreign := ctx.foreign:
        return keep(ctx, Reason(ReasonCode.DOMAIN, "an operand has another float dtype", foreign))
    if ctx.name in _REDISPATCHED and not reading.has_plain_update(ctx.eqn):
        return keep(ctx, Reason(ReasonCode.KEEP, "the update computation is the user's"))
    return None


def _is_known(ctx: Context) -> EquationPlan | None:
    """A function of literals alone is a literal."""
    # `x / sqrt(64)` is traced as a literal under a square root. Unfolded, the root would be a
    # computed float32 value, whose vote raises the scores of every attention to float32.
    if any([state.known_value is None or state.dtype != FLOAT32 for state in ctx.given]):
        return None
    # It is folded in the declared dtype, as XLA would compute it: guards check its value.
    with np.errstate(all="ignore"):
        known = FOLDS[ctx.name](*[FLOAT32.type(state.known_value) for state in ctx.given])
    plan = keep(ctx, Reason(ReasonCode.SOURCE, "a literal", tuple(ctx.floats)))
    results = tuple(ValueState(s.dtype, Source.LITERAL, float(known)) for s in plan.results)
    return dataclasses.replace(plan, results=results)


def _has_a_rule(ctx: Context) -> EquationPlan | None:
    """The rule of the primitive decides; an equation without a rule keeps its dtypes."""
    rule, origin = known_rule(ctx.name, ctx.region.rule)
    if origin == "unknown":
        return keep(ctx, Reason(ReasonCode.UNKNOWN, ctx.name))
    decision = _PLAIN[rule] if isinstance(rule, CastPolicy) else _decided(rule, ctx)
    if decision.emit is not None:
        return emitted(ctx, decision)
    plan = _by_policy(ctx, decision, origin)
    plan = cast_results(plan, decision)
    return in_precision(ctx, plan, decision.precision) if decision.precision else plan


DECISIONS: tuple[Link, ...] = (
    Link(_has_no_floats),
    Link(_moves_a_source, DATA_MOVEMENT),
    Link(_stands_in_scope),
    Link(_is_not_ours),
    Link(_is_known, FOLDS),
    Link(_has_a_rule),
)


def _decided(rule: Any, ctx: Context) -> Decision:
    """Returns the decision of a rule that is a function."""
    decision = apply_rule(rule, view_of(ctx))
    if decision.policy is not None:
        check_obeyed(ctx.name, decision.policy)
    return decision


def _by_policy(ctx: Context, decision: Decision, origin: str) -> EquationPlan:
    """Returns the plan by the cast policy of a decision, without the decision's other fields.

    Args:
        ctx: The equation.
        decision: The rule's decision.
        origin: The origin of its rule. `GUARDS` do not apply to a product that `with_rules` lowers,
            and `_leads_to_no_product` applies to default rules only.
    """
    contracts = ctx.name in _CONTRACTS
    if decision.policy is CastPolicy.KEEP:
        return keep(ctx, _KEEP)
    if decision.policy is CastPolicy.LOWER_PRECISION_FP:
        guarded = origin != "rules"
        low = _lower(ctx, guarded=guarded)
        if not _is_rounded(low) or not contracts:
            return low
        if guarded and _reads_whole(ctx) is not None:
            # The result is float32: it may hold whole numbers above 256, which bfloat16 rounds.
            return _with_float32_result(ctx, low, _COUNTS)
        plan = _accumulating(ctx, low)
        if ctx.region.product is None:
            return plan
        of_sources = not ctx.policy.rounds_weight_gradients
        return ctx.region.product(ctx, cast_results(plan, decision), of_sources)
    if decision.policy is CastPolicy.FP32_APPEND_DTYPE and contracts:
        return _with_float32_result(ctx, _lower(ctx, guarded=True), _REQUESTED)
    if decision.policy in FULL_POLICIES:
        plan = in_dtype(ctx, FLOAT32, _FULL)
        is_sum = decision.policy is CastPolicy.FP32_SET_OPT_DTYPE
        if is_sum and ctx.given[ctx.floats[0]].narrowed_by_user:
            # jnp.sum(x, dtype=bfloat16) casts its operand: the user set the dtype.
            return rounded_once(plan, ctx.compute_dtype, plan.reason)
        return plan
    return _first(PROMOTIONS if origin == "default" else _PROMOTES, ctx)


# --- LOWER_PRECISION_FP ---------------------------------------------------------------------


def _lower(ctx: Context, guarded: bool) -> EquationPlan:
    """Returns the plan in the compute dtype, unless the user or a guard decides for float32."""
    contracts = ctx.name in _CONTRACTS
    # A rule of the policy, or a scope with a dtype, overrules a precision in the program.
    overrules = not guarded or bool(ctx.region.cause)
    if contracts and (plan := _requested(ctx, overrules)) is not None:
        return plan
    if guarded and (plan := _first(GUARDS, ctx)) is not None:
        return plan
    # A product may be lowered: XLA multiplies 16-bit operands exactly and adds in float32 on every
    # backend. Only the operands and the result are rounded, in bfloat16 by 2**-9 of each.
    plan = in_dtype(ctx, ctx.compute_dtype, _LOW)
    if not contracts:
        return plan
    action, results = plan.action, plan.results
    # jnp.matmul sets the preferred dtype to that of its operands: float32 is a request only if the
    # operands have 16 bits.
    declared_low = all(aval_of(ctx.eqn.invars[i]).dtype == ctx.compute_dtype for i in ctx.floats)
    if declared_low and reading.preferred_dtype(ctx.eqn) == FLOAT32:
        results = tuple(ValueState(FLOAT32) for _ in results)
        action = action if isinstance(action, Keep) else BIND
    if isinstance(action, Bind) and (dropped := reading.without_request(ctx.eqn)):
        action = dataclasses.replace(action, params={**action.params, **dropped})
    return dataclasses.replace(plan, results=results, action=action)


def _requested(ctx: Context, overrules: bool) -> EquationPlan | None:
    """Returns the plan of a product that keeps its dtypes, None for one that may be lowered.

    Args:
        ctx: The product.
        overrules: The policy lowers the product regardless of the program's precision.
    """
    if not overrules and (precision := reading.requested_precision(ctx.eqn)) is not None:
        return keep(ctx, Reason(ReasonCode.USER_PRECISION, f"precision={precision}"))
    if ctx.floats[:2] != [0, 1]:
        return keep(ctx, Reason(ReasonCode.DOMAIN, "an operand is no float"))
    if ctx.declared(ctx.eqn.outvars[0]) is None:
        return keep(ctx, Reason(ReasonCode.DOMAIN, "the result has another dtype"))
    return None


def _exceeds_the_range(ctx: Context) -> EquationPlan | None:
    """A literal or constant needs float32 if the compute dtype makes it infinity, 0, 1 or -1.

    Without this guard, a mask's -1e9 was -inf in float16, and a masked row NaN.
    """
    # In a product, only float16 needs the guard: a weight may exceed its maximum, 65,504. A weight
    # that exceeds the maximum of bfloat16, 3.4e38, exceeds that of float32, too.
    if ctx.name in _CONTRACTS and ctx.compute_dtype != np.float16:
        return None
    reason = literal_guard(ctx.given, ctx.floats, ctx.compute_dtype)
    return None if reason is None else in_dtype(ctx, FLOAT32, reason)


def _cannot_pay(ctx: Context) -> EquationPlan | None:
    """A contraction that sums at most 4 elements promotes, as a `mul` does: 16 bits save no time.

    Without this guard, atoms in a cell of 70 angstroms were 0.3 angstroms off, points in a camera's
    image 2.6 pixels, and the angle of position 1,000 was 2 radians off.
    """
    if not cannot_pay(ctx.eqn):
        return None
    # A product of a parameter and a 16-bit operand is lowered, such as a LoRA of rank 4: the
    # parameter has no vote.
    votes = voters(ctx)
    if votes and all([is_16_bit(ctx.given[i].dtype) for i in votes]):
        return None
    return _saying("at most 4 elements are summed", _first(PROMOTIONS, ctx))


def _saying(why: str, plan: EquationPlan) -> EquationPlan:
    """Returns the plan with ``why`` appended to its cause, if votes decided about it."""
    votes = (ReasonCode.PROMOTE_LOW, ReasonCode.PROMOTE_FULL, ReasonCode.SOURCE)
    if plan.reason.code not in votes:
        return plan
    reason = dataclasses.replace(plan.reason, cause=f"{plan.reason.cause}; {why}")
    return dataclasses.replace(plan, reason=reason)


def _reads_what_needs_digits(ctx: Context) -> EquationPlan | None:
    """A contraction with positions, a stencil or (in float16) an unbounded `exp` is float32.

    Without this guard, the angle of position 255, which bfloat16 holds, was half a radian off, the
    Laplacian of a smooth field was off by 3.7 times its size, and `exp(s) @ v` was infinite from
    scores of 11.1 on.
    """
    reasons = (reason for i in (0, 1) if (reason := _needs_digits(ctx, i)) is not None)
    return next((in_dtype(ctx, FLOAT32, reason) for reason in reasons), None)


def _needs_digits(ctx: Context, i: int) -> Reason | None:
    """Returns why operand ``i`` of a contraction needs float32, None if it does not."""
    state, marks, constant = ctx.given[i], ctx.marks[i], ctx.given[i].const_range
    if constant is not None:
        # If a constant is a stencil, or subtracts coordinates of points, the result is a small
        # difference of large terms. No learned weight adds up to 0.
        if constant.small.is_stencil:
            return Reason(ReasonCode.LITERAL, f"the elements of constant {i} add up to 0", (i,))
        if constant.small.has_both_signs and reading.multiplies_points(ctx.eqn, i):
            return Reason(ReasonCode.LITERAL, f"constant {i} adds and subtracts points", (i,))
    # An angle is a position times a frequency. Integers of the program's inputs are positions if
    # the contraction sums at most three of them (x, y, z), else a mask, one-hot rows, an adjacency
    # or a weight.
    if marks.counted or (constant is not None and constant.small.is_even):
        return Reason(ReasonCode.COORD, f"operand {i} holds evenly spaced positions", (i,))
    is_given = marks.whole and state.source is Source.DATA
    if is_given and at_least(3, reading.reduction_depth(ctx.eqn)):
        return Reason(ReasonCode.COORD, f"operand {i} holds integers", (i,))
    # The mark `exponential` is not set for the `exp` of a value less its row's maximum, or of a
    # negated square: neither exceeds 1.
    if marks.exponential and state.dtype == FLOAT32 and ctx.compute_dtype == np.float16:
        return Reason(ReasonCode.LITERAL, f"operand {i} is an exp without a bound", (i,))
    return None


def _is_needed(ctx: Context) -> EquationPlan | None:
    """A contraction is float32 if a consumer needs its digits: a decomposition, an index.

    Without this guard, 98 % of the cells of a mixed-radix quantizer were wrong. `needs.ROWS` has
    the errors for other consumers.
    """
    if ctx.need & OF_PRODUCTS:
        row = next(row for row in ROWS if ctx.need & row.need & OF_PRODUCTS)
        return in_dtype(ctx, FLOAT32, Reason(ReasonCode.FEEDER, READ_BY + row.consumer))
    is_index = ctx.need & Need.SNAP and _reads_whole(ctx) is False
    return in_dtype(ctx, FLOAT32, _WHOLE) if is_index else None


def _reads_whole(ctx: Context) -> bool | None:
    """Returns whether 16 bits hold the operands of a product of integers, None for other products.

    A product of integers and other values, such as one-hot rows times a table, counts if its result
    becomes an index.
    """
    held = [_holds_whole(ctx, i) for i in (0, 1)]
    if held == [None, None] or (None in held and not ctx.need & Need.SNAP):
        return None
    return all(held)


def _holds_whole(ctx: Context, i: int) -> bool | None:
    """Returns whether 16 bits hold the integers in an operand, None for other operands."""
    state = ctx.given[i]
    if state.const_range is not None:
        found = state.const_range.small.holds_whole
        return None if found is None else ctx.compute_dtype in found
    if not ctx.marks[i].whole:
        return None
    known = state.known_value
    with np.errstate(over="ignore"):  # a number that overflows is not held
        is_held = known is not None and ctx.compute_dtype.type(known) == known
    return state.may_be_rounded or bool(is_held)


GUARDS: tuple[Link, ...] = (
    Link(_exceeds_the_range),
    Link(_cannot_pay),
    Link(_is_needed, _CONTRACTS),
    Link(_reads_what_needs_digits, _CONTRACTS),
)


def _accumulating(ctx: Context, plan: EquationPlan) -> EquationPlan:
    """Returns the plan of a 16-bit product with a float32 gradient of each source that it reads.

    A convolution keeps its plan: XLA's GPU backend runs one with a float32 result in float32.
    """
    # The gradient of a weight is a sum over a batch, and over devices. If it is rounded before the
    # sum over devices, small differences between devices are lost: 257 becomes 256 in bfloat16.
    # ``level="by_hand"`` accepts this loss, to send half the bytes.
    action = _contract(ctx, plan)
    of_source = action.of_sources and any(
        s.source is not None and s.dtype == FLOAT32 for s in ctx.given[:2]
    )
    unrounded = of_source and ctx.name != "conv_general_dilated"
    return dataclasses.replace(plan, action=action) if unrounded else plan


def _contract(ctx: Context, plan: EquationPlan) -> Contract:
    params = plan.action.params if isinstance(plan.action, Bind) else {}
    return Contract(not ctx.policy.rounds_weight_gradients, params)


def _with_float32_result(ctx: Context, plan: EquationPlan, reason: Reason) -> EquationPlan:
    """Returns the plan of a 16-bit contraction whose float32 accumulator is its result."""
    if not _is_rounded(plan):
        return plan
    results = tuple(ValueState(FLOAT32) for _ in plan.results)
    return dataclasses.replace(plan, results=results, reason=reason, action=_contract(ctx, plan))


def _is_rounded(plan: EquationPlan) -> bool:
    """Whether the plan lowers the equation, and so rounds its result to 16 bits."""
    lowered = plan.reason is _LOW and not isinstance(plan.action, Keep)
    return lowered and plan.results[0].dtype != FLOAT32


# --- PROMOTE --------------------------------------------------------------------------------


def _leads_to_no_product(ctx: Context) -> EquationPlan | None:
    """A value is float32 unless it leads, through elementwise operations and moves, to a product.

    Without this link, `int(sigmoid(x @ w) * 255)` was wrong in 2 to 25 % of its elements in
    bfloat16.
    """
    chooses = ctx.name in _COMPUTES_NOTHING and not chooses_in_float32(ctx.eqn)
    if ctx.need & Need.LEADS or chooses:
        return None
    plan = _first(_PROMOTES, ctx)
    # Values that the program declares in 16 bits stay in 16 bits.
    is_rounded = plan.reason.code is ReasonCode.PROMOTE_LOW and plan.results[0].dtype != FLOAT32
    is_raised = plan.reason.code in (ReasonCode.FEEDER, ReasonCode.LOG_GUARD)
    if (is_rounded or is_raised) and ctx.declared(ctx.eqn.outvars[0]) == FLOAT32:
        return in_dtype(ctx, FLOAT32, _NO_PRODUCT)
    return plan


def _is_accumulator(ctx: Context) -> EquationPlan | None:
    """An accumulator, such as a residual stream, is float32, except at level "compute".

    Without this link, a bfloat16 residual stream lost 86 to 97 % of 24 branches of 1e-3.
    """
    is_added = bool(ctx.need & Need.ADDED)
    adds_up = not ctx.policy.data_abstains and accumulates(ctx.eqn, ctx.marks, is_added)
    return in_dtype(ctx, FLOAT32, _ACCUMULATES) if adds_up else None


def _derivative_leaves(ctx: Context) -> EquationPlan | None:
    """An equation whose derivative may leave float16's range is float32, and rounded once.

    Without this link, a gradient of linear attention was off by 20 times its size, and the gradient
    of a GELU was NaN.
    """
    if not derivative_leaves(ctx.eqn, ctx.marks, ctx.region):
        return None
    plan = _saying("its derivative may leave float16", _consumers_decide(ctx))
    if not is_16_bit(plan.results[0].dtype):
        return None
    full = in_dtype(ctx, FLOAT32, plan.reason)
    return rounded_once(full, ctx.compute_dtype, plan.reason)


def _consumers_decide(ctx: Context) -> EquationPlan | None:
    """An equation follows its consumers, if these need float32 or if all of them are products.

    Without this link, an `exp` read rounded operands, and a transposed float32 value was stored in
    float32 for a product.
    """
    plan = _voters_decide(ctx)
    code = plan.reason.code
    # A value that the program declares in 16 bits stays in 16 bits.
    is_float = plan.results[0].is_computed and ctx.declared(ctx.eqn.outvars[0]) == FLOAT32
    if code is ReasonCode.PROMOTE_LOW and is_float and (consumer := _needs_float32(ctx)):
        code = ReasonCode.LOG_GUARD if ctx.name in _SATURATES else ReasonCode.FEEDER
        return in_dtype(ctx, FLOAT32, Reason(code, READ_BY + consumer))
    if code is ReasonCode.PROMOTE_FULL and _is_only_read_low(ctx):
        return in_dtype(ctx, ctx.compute_dtype, _READ_LOW)
    return plan


def _needs_float32(ctx: Context) -> str:
    """Returns the consumer that needs float32 of an equation in 16 bits, "" if none does."""
    is_intended = is_stream(ctx.eqn, ctx.marks, ctx.policy.data_abstains)
    if is_intended and not ctx.need & HARMED:
        return ""
    if needed := raised_for(ctx.eqn, ctx.need):
        return next(row for row in ROWS if needed & row.need).consumer
    if follows_consumers(ctx.eqn, ctx.marks, ctx.need, ctx.region):
        return "all consumers"
    # Rounding commutes with ``neg``, ``max`` or a transpose, so that the cast to float32 may come
    # before or after them. If it comes after them, each cotangent is rounded before it is added to
    # those of the other consumers. In ``max(z, 0) - z * y + log1p(exp(-abs(z)))`` three cotangents
    # nearly cancel if a model is right: in bfloat16 the gradient was off by 16 % for labels that
    # are 0.01 off, and by 4 % for a contrastive loss, which reads logits and their transpose. A
    # value with one float32 consumer is cast behind them: masked scores, or an activation before a
    # norm, would become a float32 residual.
    is_shared = any([state.is_shared for state in ctx.given])
    return "several consumers" if is_shared and ctx.need & EITHER == Need.FULL else ""


def _computed(ctx: Context) -> set[Atom]:
    """Returns the computed operands."""
    pairs = zip(ctx.eqn.invars, ctx.given, strict=True)
    return {v for v, state in pairs if state.is_computed}


def _is_only_read_low(ctx: Context) -> bool:
    """Whether all consumers of an equation that commutes with rounding read 16 bits.

    It is then computed from a copy of its one computed operand, which may not be larger than the
    result: a cast of a row costs less than a cast of the buffer that holds it.
    """
    if ctx.name not in _CLEARS or ctx.need & (EITHER | HARMED | OF_PRODUCTS) != Need.LOW:
        return False
    is_held = literal_guard(ctx.given, ctx.floats, ctx.compute_dtype) is None
    computed = _computed(ctx)
    return is_held and len(computed) == 1 and is_as_large(ctx.eqn.outvars[0], computed.pop())


def _voters_decide(ctx: Context) -> EquationPlan | None:
    """The widest voter sets the dtype, as in PyTorch; without voters, `_of_sources` plans."""
    given, floats = ctx.given, ctx.floats
    votes = voters(ctx)
    if not votes:
        return _of_sources(ctx)
    # A value that the program declares in 16 bits stays in 16 bits at every level.
    declared_full = any(aval_of(ctx.eqn.invars[i]).dtype == FLOAT32 for i in votes)
    if ctx.policy.level == "tensor_cores" and declared_full and ctx.name not in DATA_MOVEMENT:
        return in_dtype(ctx, FLOAT32, _TENSOR_CORES)
    target = ctx.joined(votes)
    if target == FLOAT32:
        by = next((i for i in votes if given[i].dtype == FLOAT32), votes[0])
        source = given[by].source
        what = "computed" if source is None else f"a {source.value} source"
        cause = f"operand {by} is {target}, {what}"
        return in_dtype(ctx, target, Reason(ReasonCode.PROMOTE_FULL, cause, (by,)))
    reason = literal_guard(given, floats, target)
    if reason is None and not ctx.policy.data_abstains:
        reason = far_literal(ctx, target)
    if reason is not None:
        return in_dtype(ctx, FLOAT32, reason)
    cause = f"operand{'s' * (len(votes) > 1)} {', '.join(map(str, votes))}"
    return in_dtype(ctx, target, Reason(ReasonCode.PROMOTE_LOW, cause, tuple(votes)))


_PROMOTES: tuple[Link, ...] = (
    Link(_is_accumulator),
    Link(_derivative_leaves, DERIVATIVES),
    Link(_consumers_decide),
)
PROMOTIONS: tuple[Link, ...] = (Link(_leads_to_no_product), *_PROMOTES)


def _of_sources(ctx: Context) -> EquationPlan:
    """Returns the plan of a function of sources alone, whose result is a source in their dtype."""
    floats, given = ctx.floats, ctx.given
    # With a literal beyond the range of 16 bits, the result is a computed float32 value: a source
    # would be cast to 16 bits for its consumers.
    reason = literal_guard(given, floats, ctx.compute_dtype)
    if reason is not None:
        return in_dtype(ctx, FLOAT32, reason)
    # At level "compute" the residual stream is 16 bits from the embedding on, as in a model that is
    # written by hand with ``dtype=``.
    if ctx.policy.data_abstains and starts_stream(ctx):
        return in_dtype(ctx, ctx.compute_dtype, _ROWS)
    # The most demanding kind wins: data votes, a parameter has a gradient, a constant has neither.
    kinds = {given[i].source for i in floats}
    order = (Source.DATA, Source.PARAM, Source.CONST)
    source = next((kind for kind in order if kind in kinds), Source.CONST)
    reason = Reason(ReasonCode.SOURCE, f"of {source.value} sources", tuple(floats))
    plan = in_dtype(ctx, ctx.joined(floats), reason)
    # If all values to select from may be rounded, so may the selection: `where(mask, 1.0, 0.0)`.
    harmless = ctx.name in _SELECTS and all(is_harmless(given[i]) for i in floats)
    tags = [s.tag for s in given if s.tag is not None and source is Source.PARAM]
    tag = tags[0].moved(is_whole=False) if tags else None
    marks = functools.partial(dataclasses.replace, source=source, may_be_rounded=harmless, tag=tag)
    results = tuple(s if s.dtype is None else marks(s) for s in plan.results)
    return dataclasses.replace(plan, results=results)
