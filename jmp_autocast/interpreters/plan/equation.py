"""Plans an equation without bodies: by its cast policy, guards, needs and votes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

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
from ..compat import aval_of
from ..primitives import reading
from ..primitives.traits import FOLDS, having
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
from .consumers import (
    derivative_leaves,
    float32_consumer,
    is_accumulator,
    leads_to_no_product,
)
from .data import (
    READ_BY,
    Bind,
    Context,
    Contract,
    EquationPlan,
    Move,
    Reason,
    ReasonCode,
    Source,
    ValueState,
)
from .needs import EITHER, HARMED, OF_PRODUCTS, ROWS, Need, cannot_pay
from .votes import far_literal, is_harmless, literal_guard, starts_stream, voters

_CONTRACTS = having("contracts")
_KEEPS_ALL = having("whole")
_REDISPATCHED = having("redispatch")
_SATURATES = having("saturates")
_CLEARS = having("clears")
_COUNTS_TIES = frozenset(("scatter-max", "scatter-min"))
_ROUNDS = having("rounds")
# Primitives whose results hold elements of their operands, perhaps negated.
_SELECTS = having("affine") & having("rounds")


def plan_equation(ctx: Context) -> EquationPlan:
    """Plans an ordinary equation: the first function that returns a plan decides.

    Args:
        ctx: The equation in its context.

    Returns:
        The plan of the equation.
    """
    plan = (
        _has_no_floats(ctx)
        or _moves_a_source(ctx)
        or _keeps_its_dtypes(ctx)
        or _is_known(ctx)
        or _has_a_rule(ctx)
    )
    return in_precision(ctx, plan, ctx.region.precision)


# --- every equation -------------------------------------------------------------------------


def _has_no_floats(ctx: Context) -> EquationPlan | None:
    """Integers, bools and float8 arrays of the program are never cast; an `iota` is data."""
    if ctx.floats:
        return None
    plan = keep(ctx, Reason(ReasonCode.NO_FLOAT))
    if ctx.name != "iota" or (dtype := plan.results[0].dtype) is None:
        return plan
    return dataclasses.replace(plan, results=(ValueState(dtype, Source.DATA),))


def _moves_a_source(ctx: Context) -> EquationPlan | None:
    """A move of a source returns a source of the same dtype, which each consumer casts."""
    if ctx.name not in DATA_MOVEMENT or len(ctx.floats) != 1:
        return None
    if (state := ctx.given[ctx.floats[0]]).source is None:
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


def _keeps_its_dtypes(ctx: Context) -> EquationPlan | None:
    """Keeps the dtypes in a float32 scope, for another dtype, and for a user's scatter update."""
    if ctx.region.compute_dtype is None:
        return keep(ctx, Reason(ReasonCode.SCOPE, ctx.region.cause))
    # A user chooses float64 for its digits, float8 together with scales, and float16 in a bfloat16
    # program for values of a known range.
    dtypes = [getattr(v.aval, "dtype", None) for v in ctx.eqn.invars]
    floats = [(i, d) for i, d in enumerate(dtypes) if isinstance(d, np.dtype) and d.kind in "fcV"]
    if foreign := tuple([i for i, d in floats if d not in (FLOAT32, ctx.compute_dtype)]):
        return keep(ctx, Reason(ReasonCode.DOMAIN, "an operand has another float dtype", foreign))
    if ctx.name in _REDISPATCHED and not reading.has_plain_update(ctx.eqn):
        return keep(ctx, Reason(ReasonCode.KEEP, "the update computation is the user's"))
    return None


def _is_known(ctx: Context) -> EquationPlan | None:
    """A function of literals alone is a literal."""
    # `x / sqrt(64)` is traced as a literal under a square root. Unfolded, the root would be a
    # computed float32 value, whose vote raises the scores of every attention to float32.
    values = [state.known_value for state in ctx.given if state.dtype == FLOAT32]
    if ctx.name not in FOLDS or None in values or len(values) < len(ctx.given):
        return None
    # It is folded in the declared dtype, as XLA would compute it: guards check its value.
    with np.errstate(all="ignore"):
        known = FOLDS[ctx.name](*map(FLOAT32.type, values))
    plan = keep(ctx, Reason(ReasonCode.SOURCE, "a literal", tuple(ctx.floats)))
    results = tuple(ValueState(s.dtype, Source.LITERAL, float(known)) for s in plan.results)
    return dataclasses.replace(plan, results=results)


def _has_a_rule(ctx: Context) -> EquationPlan:
    """The rule of the primitive decides; an equation without a rule keeps its dtypes."""
    rule, origin = known_rule(ctx.name, ctx.region.rule)
    if origin == "unknown":
        return keep(ctx, Reason(ReasonCode.UNKNOWN, ctx.name))
    if isinstance(rule, CastPolicy):
        decision = Decision(policy=rule)
    else:
        decision = apply_rule(rule, view_of(ctx))
        if decision.policy is not None:
            check_obeyed(ctx.name, decision.policy)
    if decision.emit is not None:
        return emitted(ctx, decision)
    plan = cast_results(_by_policy(ctx, decision, origin), decision)
    return in_precision(ctx, plan, decision.precision) if decision.precision else plan


def _by_policy(ctx: Context, decision: Decision, origin: str) -> EquationPlan:
    """Returns the plan by the cast policy of a decision, without the decision's other fields.

    Args:
        ctx: The equation.
        decision: The rule's decision.
        origin: The origin of its rule. Guards do not apply to a product that `with_rules` lowers,
            and `leads_to_no_product` applies to default rules only.
    """
    policy, is_lowered = decision.policy, decision.policy is CastPolicy.LOWER_PRECISION_FP
    if policy is CastPolicy.KEEP:
        return keep(ctx, Reason(ReasonCode.KEEP, "policy KEEP"))
    guarded = not is_lowered or origin != "rules"
    if ctx.name in _CONTRACTS and (is_lowered or policy is CastPolicy.FP32_APPEND_DTYPE):
        return _plan_product(ctx, decision, guarded)
    if is_lowered:
        return _lower(ctx, guarded)
    if policy in FULL_POLICIES:
        plan = in_dtype(ctx, FLOAT32, Reason(ReasonCode.FP32))
        is_sum = policy is CastPolicy.FP32_SET_OPT_DTYPE
        if is_sum and ctx.given[ctx.floats[0]].narrowed_by_user:
            # jnp.sum(x, dtype=bfloat16) casts its operand: the user set the dtype.
            return rounded_once(plan, ctx.compute_dtype)
        return plan
    return _promote(ctx, is_default=origin == "default")


# --- LOWER_PRECISION_FP ---------------------------------------------------------------------


def _lower(ctx: Context, guarded: bool) -> EquationPlan:
    """Returns the plan in the compute dtype, unless a guard decides for float32."""
    if guarded:
        if (plan := _cannot_pay(ctx)) is not None:
            return plan
        if (reason := _guard(ctx)) is not None:
            return in_dtype(ctx, FLOAT32, reason)
    return in_dtype(ctx, ctx.compute_dtype, Reason(ReasonCode.LOWER_PRECISION))


def _plan_product(ctx: Context, decision: Decision, guarded: bool) -> EquationPlan:
    """Returns the plan of a contraction that its policy lowers, with its accumulator's dtype.

    A product may be lowered: XLA multiplies 16-bit operands exactly and adds in float32 on every
    backend. Only the operands and the result are rounded, in bfloat16 by 2**-9 of each.
    """
    if (reason := _requested(ctx, guarded)) is not None:
        return keep(ctx, reason)
    plan = _lower(ctx, guarded)
    if plan.reason.code is not ReasonCode.LOWER_PRECISION or not isinstance(plan.action, Bind):
        return plan
    results, dropped = (ValueState(FLOAT32),), reading.without_request(ctx.eqn)
    # jnp.matmul sets the preferred dtype to that of its operands: float32 is a request only if the
    # operands have 16 bits.
    declared_low = all(aval_of(ctx.eqn.invars[i]).dtype == ctx.compute_dtype for i in ctx.floats)
    if declared_low and reading.preferred_dtype(ctx.eqn) == FLOAT32:
        return dataclasses.replace(plan, results=results, action=Bind(dropped))
    params = {**plan.action.params, **dropped}
    action = Contract(not ctx.policy.rounds_weight_gradients, params)
    if decision.policy is CastPolicy.FP32_APPEND_DTYPE:
        reason = Reason(ReasonCode.DOT_OUT, "a rule asks for float32")
    elif guarded and _reads_whole(ctx) is not None:
        # The result is float32: it may hold whole numbers above 256, which bfloat16 rounds.
        reason = Reason(ReasonCode.DOT_OUT, "its result is whole numbers")
    if reason is not None:
        return dataclasses.replace(plan, results=results, action=action, reason=reason)
    # The gradient of a weight is a sum over a batch, and over devices. If it is rounded before the
    # sum over devices, small differences between devices are lost: 257 becomes 256 in bfloat16.
    # ``level="by_hand"`` accepts this loss, to send half the bytes. A convolution is bound as it
    # is: XLA's GPU backend runs one with a float32 result in float32.
    reads_source = any(s.source is not None and s.dtype == FLOAT32 for s in ctx.given[:2])
    unrounded = action.of_sources and reads_source and ctx.name != "conv_general_dilated"
    plan = dataclasses.replace(plan, action=action if unrounded else Bind(params))
    if ctx.region.product is None:
        return plan
    return ctx.region.product(ctx, cast_results(plan, decision), action.of_sources)


def _requested(ctx: Context, guarded: bool) -> Reason | None:
    """Returns why the program's product keeps its dtypes, None if it may be lowered."""
    # A rule of the policy, or a scope with a dtype, overrules a precision in the program.
    overrules = not guarded or bool(ctx.region.cause)
    if not overrules and (precision := reading.requested_precision(ctx.eqn)) is not None:
        return Reason(ReasonCode.USER_PRECISION, f"precision={precision}")
    if ctx.floats[:2] != [0, 1] or ctx.declared(ctx.eqn.outvars[0]) is None:
        return Reason(ReasonCode.DOMAIN, "an operand or the result is no float")
    return None


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
    return _because("at most 4 elements are summed", _voters_decide(ctx))


def _because(why: str, plan: EquationPlan) -> EquationPlan:
    """Returns the plan with ``why`` appended to its cause."""
    reason = dataclasses.replace(plan.reason, cause=f"{plan.reason.cause}; {why}")
    return dataclasses.replace(plan, reason=reason)


def _guard(ctx: Context) -> Reason | None:
    """Returns why an equation that its policy lowers needs float32, None if it does not.

    Without the check of literals, a mask's -1e9 was -inf in float16, and a masked row NaN.
    """
    contracts, reason = ctx.name in _CONTRACTS, None
    # In a product, only float16 needs this guard: a weight may exceed its maximum, 65,504. A weight
    # that exceeds the maximum of bfloat16, 3.4e38, exceeds that of float32, too.
    if not contracts or ctx.compute_dtype == np.float16:
        reason = literal_guard(ctx.given, ctx.compute_dtype)
    if reason is None and contracts:
        reason = _is_needed(ctx) or _needs_digits(ctx, 0) or _needs_digits(ctx, 1)
    return reason


def _is_needed(ctx: Context) -> Reason | None:
    """A contraction is float32 if a consumer needs its digits: a decomposition, an index.

    Without this guard, 98 % of the cells of a mixed-radix quantizer were wrong. `needs.ROWS` has
    the errors for other consumers.
    """
    if ctx.need & OF_PRODUCTS:
        row = next(row for row in ROWS if ctx.need & row.need & OF_PRODUCTS)
        return Reason(ReasonCode.FEEDER, READ_BY + row.consumer)
    if ctx.need & Need.SNAP and _reads_whole(ctx) is False:
        return Reason(ReasonCode.COORD, "whole numbers that 16 bits may not hold")
    return None


def _needs_digits(ctx: Context, i: int) -> Reason | None:
    """Positions, a stencil and (in float16) an unbounded `exp` enter a contraction in float32.

    Without this guard, the angle of position 255, which bfloat16 holds, was half a radian off, the
    Laplacian of a smooth field was off by 3.7 times its size, and `exp(s) @ v` was infinite from
    scores of 11.1 on.

    Args:
        ctx: The contraction.
        i: The position of the operand.
    """
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


# --- PROMOTE --------------------------------------------------------------------------------


def _promote(ctx: Context, is_default: bool) -> EquationPlan:
    """Returns the plan by the votes of the operands and the needs of the consumers.

    Args:
        ctx: The equation.
        is_default: The equation promotes by a default rule, and not by a user's.
    """
    facts = ctx.eqn, ctx.marks, ctx.need, ctx.region
    if is_accumulator(*facts):
        return in_dtype(ctx, FLOAT32, Reason(ReasonCode.ACCUMULATOR, "added to again and again"))
    # The square of a vector with elements in the hundreds is infinite in float16.
    is_computed = any([state.source is None for state in ctx.given])
    if ctx.name in _CONTRACTS and reading.is_norm(ctx.eqn) and is_computed:
        return in_dtype(ctx, FLOAT32, Reason(ReasonCode.FP32, "a sum of squares"))
    plan = _voters_decide(ctx)
    # A value that the program declares in 16 bits stays in 16 bits, unless a consumer needs it.
    is_lowered = ctx.declared(ctx.eqn.outvars[0]) == FLOAT32
    if plan.reason.code is ReasonCode.PROMOTE_LOW and is_16_bit(plan.results[0].dtype):
        if is_default and is_lowered and leads_to_no_product(ctx.eqn, ctx.need):
            return in_dtype(ctx, FLOAT32, Reason(ReasonCode.NO_PRODUCT))
        if consumer := float32_consumer(*facts) or _several_consumers(ctx):
            code = ReasonCode.LOG_GUARD if ctx.name in _SATURATES else ReasonCode.FEEDER
            return in_dtype(ctx, FLOAT32, Reason(code, READ_BY + consumer))
    if plan.reason.code is ReasonCode.PROMOTE_FULL and _is_only_read_low(ctx):
        reason = Reason(ReasonCode.CLEAR_NARROW, "all consumers read 16 bits")
        return in_dtype(ctx, ctx.compute_dtype, reason)
    if is_16_bit(plan.results[0].dtype) and derivative_leaves(ctx.eqn, ctx.marks, ctx.region):
        # Without this, a gradient of linear attention was off by 20 times its size, and the
        # gradient of a GELU was NaN.
        plan = _because("its derivative may leave float16", plan)
        return rounded_once(in_dtype(ctx, FLOAT32, plan.reason), ctx.compute_dtype)
    if is_16_bit(dtype := plan.results[0].dtype) and ctx.name in _COUNTS_TIES:
        # bfloat16 counts to 256: the gradient of a pool of 4,000 equal rows was 2.6 times as large.
        plan = _because("its derivative counts ties", plan)
        return rounded_once(in_dtype(ctx, FLOAT32, plan.reason), dtype)
    return plan


def _several_consumers(ctx: Context) -> str:
    """Returns "several consumers" if these read an operand and the result in float32, else ""."""
    # Rounding commutes with ``neg``, ``max`` or a transpose, so that the cast to float32 may come
    # before or after them. If it comes after them, each cotangent is rounded before it is added to
    # those of the other consumers. In ``max(z, 0) - z * y + log1p(exp(-abs(z)))`` three cotangents
    # nearly cancel if a model is right: in bfloat16 the gradient was off by 16 % for labels that
    # are 0.01 off, and by 4 % for a contrastive loss, which reads logits and their transpose. A
    # value with one float32 consumer is cast behind them: masked scores, or an activation before a
    # norm, would become a float32 residual.
    is_shared = ctx.name in _ROUNDS and any([state.is_shared for state in ctx.given])
    return "several consumers" if is_shared and ctx.need & EITHER == Need.FULL else ""


def _is_only_read_low(ctx: Context) -> bool:
    """Whether all consumers of an equation that commutes with rounding read 16 bits.

    It is then computed from a copy of its one computed operand, which may not be larger than the
    result: a cast of a row costs less than a cast of the buffer that holds it.
    """
    if ctx.name not in _CLEARS or ctx.need & (EITHER | HARMED | OF_PRODUCTS) != Need.LOW:
        return False
    is_held = literal_guard(ctx.given, ctx.compute_dtype) is None
    pairs = zip(ctx.eqn.invars, ctx.given, strict=True)
    computed = {v for v, state in pairs if state.is_computed}
    return is_held and len(computed) == 1 and is_as_large(ctx.eqn.outvars[0], computed.pop())


def _voters_decide(ctx: Context) -> EquationPlan:
    """The widest voter sets the dtype, as in PyTorch; without voters, `_of_sources` plans."""
    votes = voters(ctx)
    # A value that the program declares in 16 bits stays in 16 bits at every level.
    declared_full = any(aval_of(ctx.eqn.invars[i]).dtype == FLOAT32 for i in votes)
    if ctx.policy.level == "tensor_cores" and declared_full and ctx.name not in DATA_MOVEMENT:
        return in_dtype(ctx, FLOAT32, Reason(ReasonCode.PROMOTE_FULL, "level='tensor_cores'"))
    target = _joined(ctx, votes) if votes else ctx.compute_dtype
    if target == FLOAT32:
        by = next((i for i in votes if ctx.given[i].dtype == FLOAT32), votes[0])
        source = ctx.given[by].source
        what = "computed" if source is None else f"a {source.value} source"
        reason = Reason(ReasonCode.PROMOTE_FULL, f"operand {by} is float32, {what}", (by,))
        return in_dtype(ctx, target, reason)
    # With a literal beyond the range of 16 bits, a function of sources is a computed float32 value:
    # a source would be cast to 16 bits for its consumers.
    reason = literal_guard(ctx.given, target)
    if reason is None and votes and not ctx.policy.data_abstains:
        reason = far_literal(ctx.name, ctx.given, target)
    if reason is not None:
        return in_dtype(ctx, FLOAT32, reason)
    if not votes:
        return _of_sources(ctx)
    cause = f"operand{'s' * (len(votes) > 1)} {', '.join(map(str, votes))}"
    return in_dtype(ctx, target, Reason(ReasonCode.PROMOTE_LOW, cause, tuple(votes)))


def _joined(ctx: Context, positions: Sequence[int]) -> np.dtype:
    """Returns the dtype that the operands at ``positions`` share, float32 if they differ."""
    first, *others = [ctx.given[i].dtype for i in positions]
    return FLOAT32 if first is None or any(d != first for d in others) else first


def _of_sources(ctx: Context) -> EquationPlan:
    """Returns the plan of a function of sources alone, whose result is a source in their dtype."""
    floats, given = ctx.floats, ctx.given
    # At level "compute" the residual stream is 16 bits from the embedding on, as in a model that is
    # written by hand with ``dtype=``.
    if ctx.policy.data_abstains and starts_stream(ctx):
        reason = Reason(ReasonCode.PROMOTE_LOW, "rows of a parameter")
        return in_dtype(ctx, ctx.compute_dtype, reason)
    # The most demanding kind wins: data votes, a parameter has a gradient, a constant has neither.
    kinds = {given[i].source for i in floats}
    source = next((kind for kind in (Source.DATA, Source.PARAM) if kind in kinds), Source.CONST)
    reason = Reason(ReasonCode.SOURCE, f"of {source.value} sources", tuple(floats))
    plan = in_dtype(ctx, _joined(ctx, floats), reason)
    # If all values to select from may be rounded, so may the selection: `where(mask, 1.0, 0.0)`.
    harmless = ctx.name in _SELECTS and all(is_harmless(given[i]) for i in floats)
    tags = [s.tag.moved(is_whole=False) for s in given if s.tag and source is Source.PARAM]
    tag = tags[0] if tags else None
    made = functools.partial(ValueState, source=source, may_be_rounded=harmless, tag=tag)
    results = tuple(s if s.dtype is None else made(s.dtype) for s in plan.results)
    return dataclasses.replace(plan, results=results)
