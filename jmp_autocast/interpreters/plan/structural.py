"""Plans equations without a cast policy: those with bodies, and the program's own casts.

Loops have a file of their own, `loops.py`. A higher-order primitive in `structure.py` without a
rule of its own is planned by `plan_described`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from ...policies import FLOAT32, CastPolicy, Decision, Policy
from ...policies.registry import known_rule
from ...scopes import CAST, mark
from ..compat import AnyJaxpr, aval_of, body_of, is_ref, jax_function
from ..primitives.reading import cast_dtype
from ..primitives.structure import (
    STRUCTURES,
    Body,
    bodies,
    called,
    has_rule,
    holds_rules,
    is_plain_call,
    isolates,
)
from ..regions import Regions
from .avals import is_16_bit
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
from .marks import NONE
from .need_sweep import needs_in_bodies
from .needs import EITHER, NOTHING, Need
from .reads import read_dtypes


class Plans(Protocol):
    """The interface of `Planner` that planning rules use; `Planner` imports the rules.

    Attributes:
        policy: The policy of the program.
        memo: A cache of facts about the program's jaxprs that do not depend on dtypes.
        regions: The precision in force at each equation.
        prepare: Prepares a jaxpr, under its enclosing scopes; see `Preparation`.
        anew: Makes a new planner with the same options.
        key: The options as a hashable key for caches of plans; None if no cache may be used,
            because a rule is a function, for example.
    """

    policy: Policy
    memo: Memo
    regions: Regions
    prepare: Callable[..., Any]
    anew: Callable[[], Any]
    key: Hashable

    def plan(
        self,
        jaxpr: AnyJaxpr,
        inputs: Sequence[ValueState],
        requests: Sequence[Request],
        path: tuple[str, ...] = (),
    ) -> Plan:
        """Plans a prepared jaxpr; see `Planner.plan`."""
        ...

    def plan_at(self, ctx: Context) -> EquationPlan:
        """Plans an equation in its context."""
        ...


PlanningRule = Callable[[Plans, Context], EquationPlan]

PLANNING_RULES: dict[str, PlanningRule] = {}

INSIDE = Reason(ReasonCode.STRUCTURAL)
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
    emission = _emission(ctx)
    if emission is not None:
        return emission
    return rule(planner, ctx)


def _emission(ctx: Context) -> EquationPlan | None:
    """Returns the plan that calls a function of the user's rule in place of a call, loop or cast.

    In ``full_precision()``, and in scopes of float32, nothing is replaced.

    Raises:
        TypeError: The rule decided something else, such as a cast policy, which these primitives
            do not have.
    """
    compute_dtype = ctx.region.compute_dtype
    if compute_dtype is None or not ctx.floats:
        return None
    rule, _ = known_rule(ctx.name, ctx.region.rule)
    if isinstance(rule, CastPolicy):  # the user has no rule for the primitive
        return None
    decided = rule(view_of(ctx))
    if decided is None:
        return None
    if isinstance(decided, Decision) and decided.emit is not None:
        return emitted(ctx, decided)
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
        memo: As for `needs.needs_of`.
    """
    # The operands of a checkpoint are residuals and stay in 16 bits, and so do values that are sent
    # to devices or the host.
    if not (is_plain_call(ctx.eqn) or has_rule(ctx.eqn)):
        return [None] * len(ctx.given)
    of_results = [Need(request.needs) for request in ctx.requests]
    given = memo, ctx.marks, ctx.region.names
    ((body, _, within),) = needs_in_bodies(ctx.eqn, of_results, *given)
    needs = [within.get(v, NOTHING) for v in body_of(body.jaxpr).invars]

    return [
        FLOAT32 if state.is_shared and need & EITHER == Need.FULL else None
        for state, need in zip(ctx.given, needs, strict=True)
    ]


def cast_states(
    given: Sequence[ValueState], operands: Sequence[np.dtype | None]
) -> list[ValueState]:
    """Returns the states of operands after their casts; an operand without a cast has None."""
    return [
        state
        if dtype is None
        else ValueState(
            dtype, was_rounded=dtype == FLOAT32 and is_16_bit(state.dtype), marks=state.marks
        )
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
    if any(body.carries for body in held) or not held:
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

    inner, joined, reason = plan_all(ctx.requests), list(ctx.requests), INSIDE
    # All branches have to return one dtype, and float32 holds the values of each.
    for k in range(len(joined)):
        made = _made(k, inner, held)
        if len({state.dtype for state in made}) > 1:
            joined[k] = Request(dtype=FLOAT32)
            reason = Reason(ReasonCode.BRANCH_JOIN, f"the branches disagree on result {k}")
    if reason is not INSIDE:
        inner = plan_all(joined)
    # Control operands (a branch index, a flag) are consumed by the equation itself, in declared
    # dtypes.
    inside = {i for body in held for i in body.operands}
    declared = as_declared(ctx)
    operands = tuple(None if i in inside else d for i, d in enumerate(declared))
    unchanged = all(plan.identity for plan in inner) and not any(operands)
    results = []
    for k, v in enumerate(ctx.eqn.outvars):
        made = _made(k, inner, held) or [ValueState(ctx.declared(v))]
        results.append(ValueState(made[0].dtype))
    action = Inside(tuple(inner), unchanged)
    return EquationPlan(action, given, operands, tuple(results), reason)


def _made(k: int, inner: Sequence[Plan], held: Sequence[Body]) -> list[ValueState]:
    """Returns the state of result ``k`` in each body that returns it."""
    pairs = zip(inner, held, strict=True)
    return [plan.outputs[body.results.index(k)] for plan, body in pairs if k in body.results]


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


def stacked_states(states: Sequence[ValueState]) -> tuple[ValueState, ...]:
    """Returns the states of stacked outputs of an iteration.

    These are the facts about one slice, without those that hold in one iteration only.
    """
    return tuple(
        [dataclasses.replace(s, loop_invariant=False, tag=None, marks=NONE) for s in states]
    )


def loop_invariants(states: Iterable[ValueState]) -> list[ValueState]:
    """Returns the states of a loop's constants in its body: each source is loop-invariant there."""
    return [dataclasses.replace(s, loop_invariant=True) if s.source else s for s in states]


# --- the program's own casts -----------------------------------------------------------------


@plans("convert_element_type")
def _convert_element_type(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a cast of the program, which is done as written.

    A bool or an 8-bit integer that is cast to a float is a constant; other integers become data.
    """
    (state,), (var,), (made,) = ctx.given, ctx.eqn.invars, ctx.eqn.outvars
    of, source, target = aval_of(var).dtype, ctx.declared(var), ctx.declared(made)
    cast = Reason(ReasonCode.USER_CAST, f"{of} to {cast_dtype(ctx.eqn)}")

    def plan(
        action: Action,
        result: ValueState,
        reason: Reason = cast,
        operand: np.dtype | None = None,
    ) -> EquationPlan:
        return EquationPlan(action, ctx.given, (operand,), (result,), reason)

    is_back = aval_of(made).dtype == FLOAT32
    if is_back and ctx.region.names and ctx.region.names[-1] == _OURS:
        # Autocast has added this cast after a kernel. It is left out: the result keeps its dtype.
        return plan(Cast(), state, Reason(ReasonCode.STRUCTURAL, "no cast"))
    known = state.known_value
    if source is None and target is None:
        return plan(KEEP, ValueState(None, known_value=known))
    # If the planned dtype of the operand is not its declared one, the plan replaces the cast.
    as_declared = state.dtype == source
    action = KEEP if as_declared else Cast()
    if target is None:
        return plan(action, ValueState(None))
    if source == target:
        # Only the weak type changes: the value keeps its dtype.
        code = ReasonCode.STRUCTURAL
        if state.source is not None:
            action, code = Move(as_declared), ReasonCode.SOURCE
        return plan(action, state, Reason(code, "no cast", (0,)))
    result = ValueState(target, narrowed_by_user=target != FLOAT32)
    is_number = source is None and isinstance(of, np.dtype) and of.kind in "biu"
    if is_number:
        # A bool or a byte may be rounded: every float dtype holds integers up to 256.
        is_exact = of.itemsize == 1
        action = Move() if is_exact else KEEP
        result = ValueState(
            target, Source.CONST if is_exact else Source.DATA, may_be_rounded=is_exact
        )
    if known is not None and (is_number or source is not None):
        result = ValueState(target, Source.LITERAL, known)
    if source is None:
        return plan(action, result)
    lowers = ctx.region.compute_dtype is not None and state.dtype != target
    return plan(action, result, operand=target if lowers else None)
