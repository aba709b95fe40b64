"""Plans of equations that hold jaxprs: what goes in, and in which dtypes it comes out.

Loops have a file of their own, `loops.py`. A higher-order primitive that `structure.py` describes
and that has no rule of its own is planned by `plan_described`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ...policies import FLOAT32, Policy
from ..primitives.structure import STRUCTURES, Body, bodies
from .basic_plans import as_declared, keep
from .data import (
    BIND,
    KEEP,
    Demand,
    EquationPlan,
    Inside,
    Plan,
    Reason,
    ReasonCode,
    Source,
    ValueState,
    Want,
    float_dtype,
)
from .region import Region


class PlansBodies(Protocol):
    """What a planning rule needs of the planner: the policy, and plans of other jaxprs."""

    policy: Policy

    def plan(
        self,
        jaxpr: Any,
        inputs: Sequence[ValueState],
        wants: Sequence[Want],
        path: tuple[str, ...] = (),
    ) -> Plan:
        """Plans a jaxpr; see `Planner.plan`."""
        ...


PlanningRule = Callable[
    [PlansBodies, Any, Sequence[ValueState], Region, tuple[Want, ...]], EquationPlan
]

PLANNING_RULES: dict[str, PlanningRule] = {}

INSIDE = Reason(ReasonCode.STRUCTURAL)


def plans(*names: str) -> Callable[[PlanningRule], PlanningRule]:
    """Registers the function that plans a primitive whose plan no cast policy says.

    It gets the planner, the equation, what is known of each operand, the precision where it stands,
    and what is asked of each result.
    """

    def register(function: PlanningRule) -> PlanningRule:
        PLANNING_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def planning_rule(name: str) -> PlanningRule | None:
    """Returns the function that plans a primitive, None for one that has a cast policy."""
    rule = PLANNING_RULES.get(name)
    return plan_described if rule is None and name in STRUCTURES else rule


def plan_structural(
    rule: PlanningRule,
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """Plans an equation by its rule; one that an inner autocast has dealt with is kept."""
    if region.governed:
        return keep(eqn, given, Reason(ReasonCode.SCOPE, region.cause))
    return rule(planner, eqn, given, region, wants or (Want(),) * len(eqn.outvars))


# --- what goes into a body ------------------------------------------------------------------


def read_low(
    inner: Plan,
    given: Sequence[ValueState],
    region: Region,
    sources: Sequence[Source | None] = (None,),
) -> list[np.dtype | None]:
    """Returns the casts of float32 operands, of given kinds, that a body reads in 16 bits alone.

    Before a call, a cast is shared with other readers, and what the call keeps for the backward
    pass is half as large. Before a loop, it is done once.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        given: What is known of each operand.
        region: Where the equation stands.
        sources: The kinds of the operands that may be cast; None is a computed value.
    """
    return [
        region.compute_dtype
        if demand is Demand.LOW
        and s.dtype == FLOAT32
        and s.source in sources
        and s.known_value is None
        else None
        for s, demand in zip(given, inner.demands, strict=True)
    ]


def cast_states(
    given: Sequence[ValueState], operands: Sequence[np.dtype | None]
) -> list[ValueState]:
    """Returns what is known of operands after they are cast."""
    return [s if d is None else ValueState(d) for s, d in zip(given, operands, strict=True)]


def invariant_copies(
    inner: Plan, body: Body, given: Sequence[ValueState]
) -> list[tuple[int, np.dtype]]:
    """Returns the 16-bit copies that a call inside a loop takes from outside the loop.

    Elsewhere the cast stays inside: a copy handed to ``jax.checkpoint`` would be kept for the
    backward pass.
    """
    pairs = [(body.operands[i], d) for i, d in inner.source_copies]
    return [(i, d) for i, d in pairs if given[i].loop_invariant]


# --- calls ----------------------------------------------------------------------------------


def _around(
    inner: Plan,
    given: Sequence[ValueState],
    operands: Sequence[np.dtype | None],
    copies: Sequence[tuple[int, np.dtype]] = (),
) -> EquationPlan:
    """Returns the plan of an equation whose operands and results are those of its one body."""
    unchanged = inner.identity and not any(operands)
    return EquationPlan(
        Inside((inner,), tuple(copies), unchanged),
        tuple(given),
        tuple(operands),
        inner.outputs,
        INSIDE,
        demands=inner.demands,
    )


def _calls(has_rule: bool) -> list[str]:
    calls = [(name, it) for name, it in STRUCTURES.items() if it.is_call and not it.isolates]
    return [name for name, it in calls if it.has_rule is has_rule]


@plans(*_calls(has_rule=False))
def _call(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """A call is planned as if its body stood there, and what it reads low is cast before it."""
    (body,) = bodies(eqn)
    inner = planner.plan(body.jaxpr, given, wants, region.names)
    operands = read_low(inner, given, region)
    if any(operands):
        inner = planner.plan(body.jaxpr, cast_states(given, operands), wants, region.names)
    return _around(inner, given, operands, invariant_copies(inner, body, given))


@plans(*_calls(has_rule=True))
def _custom_derivative(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """A function with a derivative rule of the user's own is a call, but takes no copies.

    A source that the body reads in 16 bits alone is cast before: the user's rule then gets, and
    keeps for the backward pass, the copy that everyone else reads.
    """
    (body,) = bodies(eqn)
    inner = planner.plan(body.jaxpr, given, wants, region.names)
    low = dict(inner.source_copies)
    operands = [
        low.get(i) if inner.demands[i] is Demand.LOW and s.source else d
        for i, (s, d) in enumerate(zip(given, read_low(inner, given, region), strict=True))
    ]
    if any(operands):
        inner = planner.plan(body.jaxpr, cast_states(given, operands), wants, region.names)
    return _around(inner, given, operands)


@plans(*(name for name, it in STRUCTURES.items() if it.isolates))
def _isolated_call(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """Operands go in as they are: a ``shard_map``'s body, and a batching rule, see no copies."""
    (body,) = bodies(eqn)
    inner = planner.plan(body.jaxpr, given, wants, region.names)
    return _around(inner, given, [None] * len(given))


# --- branches, and what has no rule of its own ----------------------------------------------


def plan_described(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """Plans an equation that runs one of its bodies, which share its results.

    Bodies that disagree on the dtype of a result all return it in float32.

    Args:
        planner: Plans the bodies.
        eqn: The equation, which `structure.py` describes.
        given: What is known of each operand.
        region: The precision of the scope that the equation is in.
        wants: What is asked of each result.
    """
    held = bodies(eqn)
    if any(body.carries for body in held) or not held:
        # Which carry may be 16 bits takes a rule that knows the loop: nothing in it is lowered.
        return keep(eqn, given, Reason(ReasonCode.KEEP, "a loop without a planning rule"))

    def plan_all(wants: Sequence[Want]) -> list[Plan]:
        return [
            planner.plan(
                body.jaxpr,
                [given[i] for i in body.operands],
                [Want() if r is None else wants[r] for r in body.results],
                region.names,
            )
            for body in held
        ]

    inner, joined, reason = plan_all(wants), list(wants), INSIDE
    for k in range(len(wants)):
        states = [
            plan.outputs[body.results.index(k)]
            for plan, body in zip(inner, held, strict=True)
            if k in body.results
        ]
        if len({state.dtype for state in states}) > 1:
            joined[k] = Want(dtype=FLOAT32)
            reason = Reason(ReasonCode.BRANCH_JOIN, f"the branches disagree on result {k}")
    if tuple(joined) != wants:
        inner = plan_all(joined)
    demands, copies = full_if_float(eqn.invars, held), {}
    for plan, body in zip(inner, held, strict=True):
        for i, demand in zip(body.operands, plan.demands, strict=True):
            demands[i] |= demand
        copies.update(dict.fromkeys(invariant_copies(plan, body, given)))
    outside = {i for i in range(len(given)) if not any(i in body.operands for body in held)}
    operands = [d if i in outside else None for i, d in enumerate(as_declared(eqn, given))]
    return EquationPlan(
        Inside(tuple(inner), tuple(copies), all(p.identity for p in inner) and not any(operands)),
        tuple(given),
        tuple(operands),
        tuple(_result(k, v, inner, held) for k, v in enumerate(eqn.outvars)),
        reason,
        demands=tuple(demands),
    )


def _result(k: int, v: Any, inner: Sequence[Plan], held: Sequence[Body]) -> ValueState:
    """Returns what is known of a result: the dtype in which the bodies return it."""
    for plan, body in zip(inner, held, strict=True):
        if k in body.results:
            return ValueState(plan.outputs[body.results.index(k)].dtype)
    return ValueState(float_dtype(v.aval))


def full_if_float(variables: Sequence[Any], held: Sequence[Body] = ()) -> list[Demand]:
    """Returns how an equation itself reads its operands: in their declared dtypes.

    Args:
        variables: The operands.
        held: Bodies; what goes into one of them is read by it, not by the equation.
    """
    inside = {i for body in held for i in body.operands}
    return [
        Demand.of(dtype if (dtype := float_dtype(v.aval)) == FLOAT32 else None)
        if i not in inside
        else Demand.NONE
        for i, v in enumerate(variables)
    ]


# --- others without a cast policy -----------------------------------------------------------


@plans("optimization_barrier")
def _operand_by_operand(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """A source behind a barrier stays one: it has no vote, and its gradients add in float32."""
    given = tuple(given)
    action = BIND if any(as_declared(eqn, given)) else KEEP
    return EquationPlan(action, given, (None,) * len(given), given, INSIDE)


@plans("source_view", "cpu_barrier", "accumulate")
def _ours(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """What an inner autocast made is bound as it made it."""
    return keep(eqn, given, Reason(ReasonCode.KEEP, "made by autocast"))


def computed_states(states: Sequence[ValueState]) -> tuple[ValueState, ...]:
    """Returns what is known of results that are new values, whatever was returned inside."""
    return tuple(
        ValueState(s.dtype, known_value=s.known_value, integer_bound=s.integer_bound)
        for s in states
    )


def loop_invariants(states: Sequence[ValueState]) -> list[ValueState]:
    """Returns what is known of the constants of a loop, inside of it."""
    return [dataclasses.replace(s, loop_invariant=True) if s.source else s for s in states]
