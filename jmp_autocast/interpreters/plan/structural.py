"""Plans equations without a cast policy: those with bodies, and the program's own casts.

Loops have a file of their own, `loops.py`. A higher-order primitive in `structure.py` without a
rule of its own is planned by `plan_described`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...policies import FLOAT32, CastPolicy, Decision
from ...policies.registry import known_rule
from ...scopes import CAST, mark
from ..compat import AnyJaxpr, aval_of, is_ref, jax_function
from ..primitives.reading import cast_dtype
from ..primitives.structure import (
    STRUCTURES,
    bodies,
    called,
    has_rule,
    holds_rules,
    is_plain_call,
    isolates,
)
from .basic_plans import as_declared, emitted, keep, view_of
from .data import (
    BIND,
    KEEP,
    Action,
    Cast,
    Context,
    EquationPlan,
    Inside,
    Move,
    Plan,
    Reason,
    ReasonCode,
    Request,
    Source,
    ValueState,
)
from .mark_sweep import Memo
from .need_sweep import needs_in_bodies, reads_of
from .needs import EITHER, Need
from .reads import read_dtypes


class Plans(Protocol):
    """The part of `Planner` that planning rules use; `Planner` imports the rules.

    Attributes:
        memo: A cache of facts about the program's jaxprs that do not depend on dtypes.
    """

    memo: Memo

    def plan(
        self,
        jaxpr: AnyJaxpr,
        inputs: Sequence[ValueState],
        requests: Sequence[Request],
        path: tuple[str, ...] = (),
    ) -> Plan:
        """Plans a prepared jaxpr; see `Planner.plan`."""
        ...


PlanningRule = Callable[[Plans, Context], EquationPlan]

PLANNING_RULES: dict[str, PlanningRule] = {}

INSIDE = Reason(ReasonCode.STRUCTURAL)
NO_CAST = Reason(ReasonCode.STRUCTURAL, "no cast")
_OURS = mark(CAST)


def plans(*names: str) -> Callable[[PlanningRule], PlanningRule]:
    """Registers the function that plans a primitive without a cast policy.

    The function takes the planner, and the equation in its context with a request for each result.
    """

    def register(function: PlanningRule) -> PlanningRule:
        PLANNING_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def planning_rule(name: str) -> PlanningRule | None:
    """Returns the function that plans a primitive, None for one that has a cast policy."""
    rule = PLANNING_RULES.get(name)
    return plan_described if rule is None and name in STRUCTURES else rule


def plan_structural(rule: PlanningRule, planner: Plans, ctx: Context) -> EquationPlan:
    """Plans an equation by its planning rule, unless an inner autocast or a user's rule decides."""
    if ctx.region.governed:
        return keep(ctx, Reason(ReasonCode.SCOPE, ctx.region.cause))
    # A rule may replace a call as a whole; its body is then never planned.
    decision = _decision(ctx)
    return rule(planner, ctx) if decision is None else emitted(ctx, decision)


def _decision(ctx: Context) -> Decision | None:
    """Returns the decision of a user's rule to replace a call, loop or cast by a function.

    In ``full_precision()``, and in scopes of float32, nothing is replaced.

    Raises:
        TypeError: The rule decided something else, such as a cast policy, which these primitives
            do not have.
    """
    if ctx.region.compute_dtype is None or not ctx.floats:
        return None
    rule, _ = known_rule(ctx.name, ctx.region.rule)
    decided = None if isinstance(rule, CastPolicy) else rule(view_of(ctx))
    if decided is None or (isinstance(decided, Decision) and decided.emit is not None):
        return decided
    raise TypeError(
        f"The rule for primitive {ctx.name!r} decided {decided}, but the primitive has no cast "
        "policy: only the equations inside it have. Return Decision(emit=function) to replace the "
        "equation, or None to leave it."
    )


# --- calls ----------------------------------------------------------------------------------


@plans(*[name for name, it in STRUCTURES.items() if it.is_call], "shard_map")
def _call(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a call as if it were inlined, with casts of its operands before it.

    Computed operands that the body reads in 16 bits only are cast before the call. In two cases,
    sources are cast as well:

    * The function has a derivative rule of the user's own. A copy cannot be passed beside a source,
      because the signature of the rule is fixed; so the 16-bit copy replaces the source. As a
      residual, the rule keeps this copy, which other consumers share, and not the float32 weight.
    * The call is a `shard_map`, at ``level="by_hand"``. Only the copy is sent to the devices, and
      the gradient has the dtype of the copy. At other levels, both the source and its copy are
      sent.

    The operands of a function with a batching rule of the user's own are never cast before it.
    """
    (body,), is_custom = bodies(ctx.eqn), has_rule(ctx.eqn)
    if is_custom:
        # The derivative rule computes products in the compute dtype. The operands lose their tags
        # (of float8, for example), so that the function computes its products in that dtype, too.
        given = [dataclasses.replace(s, tag=None) if s.tag else s for s in ctx.given]
        ctx = ctx._replace(given=tuple(given))
    inner = planner.plan(body.jaxpr, ctx.given, ctx.requests, ctx.region.names)
    casts: list[np.dtype | None] = [None] * len(ctx.given)
    if ctx.name != "custom_vmap_call":
        is_sent = ctx.name == "shard_map" and ctx.policy.rounds_weight_gradients
        low = read_low(inner, ctx, (None, *Source) if is_custom or is_sent else (None,))
        full = read_full(ctx, planner.memo)
        casts = [one or other for one, other in zip(low, full, strict=True)]
    if any(casts):
        given = cast_states(ctx.given, casts)
        inner = planner.plan(body.jaxpr, given, ctx.requests, ctx.region.names)
    unchanged = inner.identity and not any(casts) and not _may_lower_in_rule(ctx)
    is_open = any(s.is_looked_up for s in inner.outputs)
    return EquationPlan(
        Inside((inner,), unchanged, is_open and is_plain_call(ctx.eqn)),
        ctx.given,
        tuple(casts),
        inner.outputs,
        INSIDE,
    )


def _may_lower_in_rule(ctx: Context) -> bool:
    """Returns whether a rule of the user's own may have products that its function has not.

    An example is a function whose forward pass is a kernel, or a product of 8-bit integers, and
    whose backward pass is written in JAX. The rules of JAX's own functions have no products,
    except in linear algebra.
    """
    lowers = ctx.region.compute_dtype is not None
    return lowers and holds_rules(ctx.eqn) and not jax_function(called(ctx.eqn))


# --- casts of operands before a call or a loop --------------------------------------------------


def read_low(
    inner: Plan, ctx: Context, sources: Sequence[Source | None] = (None,)
) -> list[np.dtype | None]:
    """Returns the casts to 16 bits of float32 operands that the body reads in 16 bits only.

    A cast before a call is shared with other consumers of the operand, and halves the residuals of
    the call. A cast before a loop runs once.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        ctx: The equation.
        sources: The kinds of sources that may be cast, with None for computed values.
    """
    # A known value is cast at trace time. A source is not cast by default, because each consumer
    # reads its 16-bit copy through a `source_view`. A source that the body moves, such as a bias,
    # keeps its float32 gradient.
    dtype, eqns = ctx.region.compute_dtype, zip(inner.jaxpr.eqns, inner.equations, strict=True)
    moved = {id(eqn.invars[0]) for eqn, plan in eqns if isinstance(plan.action, Move)}
    may_be = [
        s.source in sources
        and s.known_value is None
        and s.dtype == FLOAT32
        and (s.source is None or isolates(ctx.eqn) or id(v) not in moved)
        for s, v in zip(ctx.given, inner.jaxpr.invars, strict=True)
    ]
    reads = read_dtypes(inner) if any(may_be) else may_be
    return [dtype if m and r == {dtype} else None for m, r in zip(may_be, reads, strict=True)]


def read_full(ctx: Context, memo: Memo) -> list[np.dtype | None]:
    """Returns the casts of 16-bit operands that a call and another consumer read in float32.

    One cast before the call serves all these consumers, and their cotangents are added in float32.
    A batch norm subtracts the mean of the operand of `jnp.var`, and the two cotangents nearly
    cancel. If they are rounded before the sum, the gradient of the previous layer is 2.5 % off in
    bfloat16, and else 0.17 %.

    Args:
        ctx: The call.
        memo: As for `need_sweep.needs_of`.
    """
    # The operands of a checkpoint are residuals and stay in 16 bits, and so do values that are sent
    # to devices or the host.
    if not (is_plain_call(ctx.eqn) or has_rule(ctx.eqn)):
        return [None] * len(ctx.given)
    of_results = [request.needs for request in ctx.requests]
    needs = reads_of(needs_in_bodies(ctx.eqn, of_results, memo, ctx.marks, ctx.region.names))
    return [
        FLOAT32 if state.is_shared and needs[i] & EITHER == Need.FULL else None
        for i, state in enumerate(ctx.given)
    ]


def cast_states(
    given: Sequence[ValueState], operands: Sequence[np.dtype | None]
) -> list[ValueState]:
    """Returns the states of operands after their casts; an operand without a cast has None."""
    return [
        state if dtype is None else ValueState(dtype, was_rounded=True, marks=state.marks)
        for state, dtype in zip(given, operands, strict=True)
    ]


# --- branches, and primitives without a rule of their own -----------------------------------


def plan_described(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans an equation, such as a `cond`, whose results come from one of its bodies.

    Bodies that disagree on the dtype of a result all return it in float32.

    Args:
        planner: Plans the bodies.
        ctx: The equation, which `structure.py` describes.
    """
    held, given = bodies(ctx.eqn), ctx.given
    if any(body.carries for body in held):
        # Only a planning rule knows which carries may have 16 bits: without one, nothing in a loop
        # is lowered.
        return keep(ctx, Reason(ReasonCode.KEEP, "a loop without a planning rule"))

    def plan_all(requests: Sequence[Request]) -> list[Plan]:
        return [
            planner.plan(
                body.jaxpr,
                [given[i] for i in body.operands],
                [Request() if r is None else requests[r] for r in body.results],
                ctx.region.names,
            )
            for body in held
        ]

    def dtypes(plans: Sequence[Plan], result: int) -> list[np.dtype | None]:
        pairs = zip(plans, held, strict=True)
        return [plan.outputs[body.results.index(result)].dtype for plan, body in pairs]

    inner, requests, reason = plan_all(ctx.requests), list(ctx.requests), INSIDE
    # All branches have to return one dtype, and float32 holds the values of each.
    for k in range(len(requests)):
        if len(set(dtypes(inner, k))) > 1:
            requests[k] = Request(dtype=FLOAT32)
            reason = Reason(ReasonCode.BRANCH_JOIN, f"the branches disagree on result {k}")
    if reason is not INSIDE:
        inner = plan_all(requests)
    return EquationPlan(
        Inside(tuple(inner), all(plan.identity for plan in inner)),
        given,
        (None,) * len(given),
        tuple([ValueState(dtypes(inner, k)[0]) for k in range(len(requests))]),
        reason,
    )


# --- others without a cast policy -----------------------------------------------------------


@plans("optimization_barrier")
def _operand_by_operand(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a barrier: after it a source is still a source, without a vote of its own."""
    action = BIND if any(as_declared(ctx)) else KEEP
    # JAX 0.12 returns no refs: consumers after the barrier read the ref that was the operand.
    results, returned = ctx.given, ctx.eqn.outvars
    if len(returned) < len(results):
        pairs = zip(results, ctx.eqn.invars, strict=True)
        results = tuple([state for state, v in pairs if not is_ref(v.aval)])
    return EquationPlan(action, ctx.given, (None,) * len(ctx.given), results, INSIDE)


@plans("source_view", "accumulate", "pick")
def as_made(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans an equation that an inner autocast has made: it is bound unchanged."""
    return keep(ctx, Reason(ReasonCode.KEEP, "made by autocast"))


# --- the program's own casts -----------------------------------------------------------------


@plans("convert_element_type")
def _convert_element_type(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a cast of the program, which is done as written.

    A bool or an 8-bit integer that is cast to a float is a constant; other integers become data.
    """
    (state,), (var,), (made,) = ctx.given, ctx.eqn.invars, ctx.eqn.outvars
    of, source, target = aval_of(var).dtype, ctx.declared(var), ctx.declared(made)
    known, as_declared = state.known_value, state.dtype == source
    # If the planned dtype of the operand is not its declared one, the plan replaces the cast.
    action: Action = KEEP if as_declared else Cast()
    operand, reason = None, Reason(ReasonCode.USER_CAST, f"{of} to {cast_dtype(ctx.eqn)}")
    if ctx.region.names[-1:] == (_OURS,) and target == FLOAT32:
        # Autocast has added this cast after a kernel. It is left out: the result keeps its dtype.
        action, result, reason = Cast(), state, NO_CAST
    elif target is None:
        result = ValueState(None, known_value=known if source is None else None)
    elif source == target:
        # Only the weak type changes: the value keeps its dtype.
        result, reason = state, NO_CAST
        action = action if state.source is None else Move(as_declared)
    else:
        result = ValueState(target, narrowed_by_user=target != FLOAT32)
        if source is not None:
            lowers = ctx.region.lowers and state.dtype != target
            operand = target if lowers else None
        elif of.kind in "biu":
            # A bool or a byte may be rounded: every float dtype holds integers up to 256.
            is_exact = of.itemsize == 1
            action = Move() if is_exact else KEEP
            kind = Source.CONST if is_exact else Source.DATA
            result = ValueState(target, kind, may_be_rounded=is_exact)
        if known is not None and (source is not None or of.kind in "biu"):
            result = ValueState(target, Source.LITERAL, known)
    return EquationPlan(action, ctx.given, (operand,), (result,), reason)
