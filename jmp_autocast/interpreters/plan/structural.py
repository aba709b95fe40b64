"""Plans of equations with bodies: the dtypes of operands and results.

Loops have a file of their own, `loops.py`. A higher-order primitive in `structure.py` without a
rule of its own is planned by `plan_described`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from ...policies import FLOAT32, CastPolicy, Decision, Policy
from ...policies.registry import known_rule
from ..compat import AnyJaxpr, is_ref, jax_function
from ..primitives.structure import (
    STRUCTURES,
    Body,
    bodies,
    called,
    holds_rules,
    is_plain_call,
)
from ..regions import Regions
from .basic_plans import as_declared, emitted, keep
from .call_operands import cast_states, read_full, read_low
from .data import BIND, KEEP, Context, EquationPlan, Inside, Plan, Request, Source, Use, ValueState
from .equation_view import view_of
from .mark_sweep import Memo
from .marks import NONE
from .reasons import Reason, ReasonCode


class Plans(Protocol):
    """The interface of `Planner`, whose file imports the planning rules.

    Attributes:
        policy: The policy of the program.
        memo: The facts about its jaxprs that do not depend on dtypes.
        regions: The precision in force at each equation.
        prepare: Prepares a jaxpr, under its enclosing scopes; see `Preparation`.
        anew: Makes a planner of the same options.
        key: The options as a hashable key for caches of plans; None if they hold more, such as a
            function.
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


def plans(*names: str) -> Callable[[PlanningRule], PlanningRule]:
    """Registers the function that plans a primitive without a cast policy.

    It gets the planner, and the equation in its context with a request for each result.
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
    """Plans an equation by its rule, unless an inner autocast, or the user, has dealt with it."""
    if ctx.region.governed:
        return keep(ctx, Reason(ReasonCode.SCOPE, ctx.region.cause))
    # A rule may replace a call as a whole; its body is then never planned.
    emission = _emission(ctx)
    if emission is not None:
        return emission
    requests = ctx.requests or (Request(),) * len(ctx.eqn.outvars)
    return rule(planner, ctx._replace(requests=requests))


def _emission(ctx: Context) -> EquationPlan | None:
    """Returns the plan that calls a function of the user's rule in place of a call, loop or cast.

    ``full_precision()``, and scopes in float32, win over the rule: nothing is replaced there.

    Raises:
        TypeError: The rule decided something else, such as a cast policy, which these primitives
            do not have.
    """
    compute_dtype = ctx.region.compute_dtype
    if compute_dtype is None or not ctx.floats:
        return None
    rule, _ = known_rule(ctx.name, ctx.region.rule)
    if isinstance(rule, CastPolicy):  # no rule of the user's
        return None
    decided = rule(view_of(ctx.eqn, ctx.given, ctx.region.names, compute_dtype))
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


def _around(ctx: Context, inner: Plan, operands: Sequence[np.dtype | None]) -> EquationPlan:
    """Returns the plan of an equation whose operands and results are those of its one body."""
    unchanged = inner.identity and not any(operands) and not _may_lower_in_rule(ctx)
    is_open = any(s.is_looked_up for s in inner.outputs)
    return EquationPlan(
        Inside((inner,), unchanged, is_open and is_plain_call(ctx.eqn)),
        ctx.given,
        tuple(operands),
        inner.outputs,
        INSIDE,
        uses=inner.uses,
    )


def _may_lower_in_rule(ctx: Context) -> bool:
    """Returns whether a rule of the user's own may have products where its function has none.

    The forward pass is a kernel, or a product of 8-bit integers, and the backward pass is written
    in JAX. The rules of JAX's own functions have no product but those of linear algebra.
    """
    lowers = ctx.region.compute_dtype is not None
    return lowers and holds_rules(ctx.eqn) and not jax_function(called(ctx.eqn))


def _calls(has_rule: bool) -> list[str]:
    calls = [(name, it) for name, it in STRUCTURES.items() if it.is_call and not it.isolates]
    return [name for name, it in calls if it.has_rule is has_rule]


def _with_casts(
    planner: Plans, ctx: Context, inner: Plan, operands: Sequence[np.dtype | None]
) -> tuple[Plan, list[np.dtype | None]]:
    """Returns the plan of the body after the casts before a call, and all these casts.

    Args:
        planner: Plans the body.
        ctx: The call.
        inner: The plan of its body without casts, with the dtypes that the body reads.
        operands: The casts to 16 bits.
    """
    casts = [low or full for low, full in zip(operands, read_full(inner, ctx), strict=True)]
    if any(casts):
        given = cast_states(ctx.given, casts)
        inner = planner.plan(called(ctx.eqn), given, ctx.requests, ctx.region.names)
    return inner, casts


@plans(*_calls(has_rule=False))
def _call(planner: Plans, ctx: Context) -> EquationPlan:
    """A call is planned as if it were inlined, with casts of its 16-bit operands before it."""
    (body,), path = bodies(ctx.eqn), ctx.region.names
    inner = planner.plan(body.jaxpr, ctx.given, ctx.requests, path)
    inner, operands = _with_casts(planner, ctx, inner, read_low(inner, ctx))
    return _around(ctx, inner, operands)


@plans(*_calls(has_rule=True))
def _custom_derivative(planner: Plans, ctx: Context) -> EquationPlan:
    """A function with a derivative rule of the user's own is a call, but takes no copies.

    A source that the body reads in 16 bits alone is cast before: the user's rule then gets, and
    keeps for the backward pass, the copy that everyone else reads.
    """
    (body,), path = bodies(ctx.eqn), ctx.region.names
    # The rule's own products are in the compute dtype, so that those of the function are, too.
    ctx = ctx._replace(given=untagged(ctx.given))
    inner = planner.plan(body.jaxpr, ctx.given, ctx.requests, path)
    # The user's rule is opaque: it keeps its operands for the backward pass. A float32 weight would
    # be kept beside its 16-bit copy.
    inner, operands = _with_casts(planner, ctx, inner, read_low(inner, ctx, (None, *Source)))
    return _around(ctx, inner, operands)


@plans("custom_vmap_call")
def _custom_batching(planner: Plans, ctx: Context) -> EquationPlan:
    """Operands go in as they are: a batching rule sees no copies."""
    (body,) = bodies(ctx.eqn)
    inner = planner.plan(body.jaxpr, ctx.given, ctx.requests, ctx.region.names)
    return _around(ctx, inner, [None] * len(ctx.given))


@plans("shard_map")
def _device_map(planner: Plans, ctx: Context) -> EquationPlan:
    """Operands that the body reads in 16 bits only are cast before the transfer to devices.

    A source is sent beside its copy, and its gradient is float32. With ``level="by_hand"`` the copy
    alone is sent, and the gradient has its dtype.
    """
    (body,) = bodies(ctx.eqn)
    inner = planner.plan(body.jaxpr, ctx.given, ctx.requests, ctx.region.names)
    kinds = (None, *Source) if planner.policy.rounds_weight_gradients else (None,)
    inner, operands = _with_casts(planner, ctx, inner, read_low(inner, ctx, kinds))
    return _around(ctx, inner, operands)


def untagged(states: Sequence[ValueState]) -> tuple[ValueState, ...]:
    """Returns the states of operands without the data of extensions."""
    return tuple(dataclasses.replace(s, tag=None) if s.tag is not None else s for s in states)


# --- branches, and primitives without a rule of their own -----------------------------------


def plan_described(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans an equation that runs one of its bodies, which share its results.

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
    # All branches have to return one type, and float32 holds what any of them returns.
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
    uses = [Use.NONE if i in inside else d for i, d in enumerate(full_if_float(ctx))]
    for plan, body in zip(inner, held, strict=True):
        for i, use in zip(body.operands, plan.uses, strict=True):
            uses[i] |= use
    declared = as_declared(ctx.eqn.invars, given)
    operands = tuple(None if i in inside else d for i, d in enumerate(declared))
    unchanged = all(plan.identity for plan in inner) and not any(operands)
    results = []
    for k, v in enumerate(ctx.eqn.outvars):
        made = _made(k, inner, held) or [ValueState(ctx.declared(v))]
        results.append(ValueState(made[0].dtype))
    action = Inside(tuple(inner), unchanged)
    return EquationPlan(action, given, operands, tuple(results), reason, uses=tuple(uses))


def _made(k: int, inner: Sequence[Plan], held: Sequence[Body]) -> list[ValueState]:
    """Returns result ``k`` as each body that makes it returns it."""
    pairs = zip(inner, held, strict=True)
    return [plan.outputs[body.results.index(k)] for plan, body in pairs if k in body.results]


def full_if_float(ctx: Context) -> list[Use]:
    """Returns the dtypes of operands that an equation itself consumes: the declared ones."""
    return [Use.FULL if ctx.declared(v) == FLOAT32 else Use.NONE for v in ctx.eqn.invars]


# --- others without a cast policy -----------------------------------------------------------


@plans("optimization_barrier")
def _operand_by_operand(planner: Plans, ctx: Context) -> EquationPlan:
    """After a barrier a source is still a source: no vote, and its gradients add up in float32."""
    action = BIND if any(as_declared(ctx.eqn.invars, ctx.given)) else KEEP
    # If JAX gives a ref no result (0.12 does not), consumers after the barrier read the ref itself.
    results, returned = ctx.given, ctx.eqn.outvars
    if len(returned) < len(results):
        pairs = zip(results, ctx.eqn.invars, strict=True)
        results = tuple([state for state, v in pairs if not is_ref(v.aval)])
    return EquationPlan(action, ctx.given, (None,) * len(ctx.given), results, INSIDE)


@plans("source_view", "accumulate", "pick")
def as_made(planner: Plans, ctx: Context) -> EquationPlan:
    """The equations of an inner autocast are bound unchanged."""
    return keep(ctx, Reason(ReasonCode.KEEP, "made by autocast"))


def stacked_states(states: Sequence[ValueState]) -> tuple[ValueState, ...]:
    """Returns the states of stacked outputs of an iteration.

    Same facts as for one slice, minus per-iteration ones.
    """
    return tuple(
        [dataclasses.replace(s, loop_invariant=False, tag=None, marks=NONE) for s in states]
    )


def loop_invariants(states: Sequence[ValueState]) -> list[ValueState]:
    """Returns the states of the constants of a loop, inside the loop."""
    return [dataclasses.replace(s, loop_invariant=True) if s.source else s for s in states]
