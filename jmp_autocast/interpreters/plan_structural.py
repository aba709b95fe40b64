"""Planning rules of the primitives that hold jaxprs: one function each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..policies import CALLS, COMPUTE_DTYPES, FLOAT32
from .carries import accumulating_carries, first_guess, settled
from .compat import body_of, inner_jaxpr_key, scan_split
from .forward import keep
from .plan import (
    CUSTOM_RULES,
    Code,
    Demand,
    EquationPlan,
    Leaf,
    Plan,
    Reason,
    ValueState,
    Wanted,
    float_dtype,
)

if TYPE_CHECKING:
    from .planner import Planner, Region

StructuralRule = Callable[
    ["Planner", Any, Sequence[ValueState], "Region", tuple[Wanted, ...]], EquationPlan
]

STRUCTURAL_RULES: dict[str, StructuralRule] = {}

_INSIDE = Reason(Code.STRUCTURAL)


def structural_rule(*names: str) -> Callable[[StructuralRule], StructuralRule]:
    """Registers the function that plans a structural primitive, outside governed regions."""

    def register(function: StructuralRule) -> StructuralRule:
        def rule(
            planner: Planner,
            eqn: Any,
            states: Sequence[ValueState],
            region: Region,
            wanted: tuple[Wanted, ...],
        ) -> EquationPlan:
            if region.governed:
                return keep(eqn, states, Reason(Code.SCOPE, region.cause))
            return function(planner, eqn, states, region, wanted or (Wanted(),) * len(eqn.outvars))

        for name in names:
            STRUCTURAL_RULES[name] = rule
        return function

    return register


def _declared(variables: Sequence[Any]) -> list[ValueState]:
    return [ValueState(float_dtype(v.aval)) for v in variables]


def _returned_as_declared(variables: Sequence[Any]) -> list[Wanted]:
    return [Wanted(dtype=float_dtype(v.aval)) for v in variables]


def _computed(states: Sequence[ValueState]) -> tuple[ValueState, ...]:
    """States of results that are new values, whatever was returned inside."""
    return tuple(ValueState(s.dtype, known=s.known, bound=s.bound) for s in states)


def _invariants(states: Sequence[ValueState]) -> list[ValueState]:
    return [dataclasses.replace(s, invariant=True) if s.leaf else s for s in states]


def _widened(states: Sequence[ValueState]) -> list[np.dtype | None]:
    """The casts of what is computed in 16 bits before a loop and read in it."""
    return [FLOAT32 if s.leaf is None and s.dtype in COMPUTE_DTYPES else None for s in states]


def _as_parameters(
    states: Sequence[ValueState], casts: Sequence[np.dtype | None]
) -> list[ValueState]:
    """States of what is computed before a loop: inside it has uses like a parameter's.

    Each step reads a view of one 16-bit copy, and the gradients of the steps add up in float32.
    Added up in 16 bits, 2,048 steps lost four fifths of the gradient of a normalized weight.
    """

    def parameter(state: ValueState, cast: np.dtype | None) -> ValueState:
        dtype = cast or state.dtype
        if dtype != FLOAT32 or state.leaf is not None:
            return state
        return dataclasses.replace(state, dtype=FLOAT32, leaf=Leaf.PARAM)

    return [parameter(state, cast) for state, cast in zip(states, casts, strict=True)]


def _invariant_copies(
    inner: Plan, states: Sequence[ValueState]
) -> tuple[tuple[int, np.dtype], ...]:
    """The 16-bit copies that a call inside a loop takes from outside the loop.

    Elsewhere the cast stays inside: a copy handed to ``jax.checkpoint`` would be kept for the
    backward pass.
    """
    return tuple((i, d) for i, d in inner.low_copies if states[i].invariant)


def _read_low(
    inner: Plan,
    states: Sequence[ValueState],
    region: Region,
    kinds: Sequence[Leaf | None] = (None,),
) -> list[np.dtype | None]:
    """The casts of float32 operands, of the given kinds, that the inside reads in 16 bits alone.

    Before a call, a cast is shared with other readers, and what the call keeps for the backward
    pass is half as large. Before a loop, it is done once.
    """
    return [
        region.low
        if demand is Demand.LOW and s.dtype == FLOAT32 and s.leaf in kinds and s.known is None
        else None
        for s, demand in zip(states, inner.demands, strict=True)
    ]


def _cast(states: Sequence[ValueState], operands: Sequence[np.dtype | None]) -> list[ValueState]:
    return [s if d is None else ValueState(d) for s, d in zip(states, operands, strict=True)]


def _restored(eqn_vars: Sequence[Any], states: Sequence[ValueState]) -> list[np.dtype | None]:
    """The casts that bring operands back to their declared dtypes."""
    return [
        None if s.dtype is None or s.dtype == v.aval.dtype else v.aval.dtype
        for v, s in zip(eqn_vars, states, strict=True)
    ]


def _full_if_float(variables: Sequence[Any]) -> list[Demand]:
    return [
        Demand.of(dtype if (dtype := float_dtype(v.aval)) == FLOAT32 else None) for v in variables
    ]


def _around(
    inner: Plan,
    operands: Sequence[np.dtype | None],
    low_copies: tuple[tuple[int, np.dtype], ...] = (),
) -> EquationPlan:
    """The plan of an equation whose inputs and outputs are those of the jaxpr in it."""
    return EquationPlan(
        tuple(operands),
        inner.outputs,
        _INSIDE,
        inner=(inner,),
        demands=inner.demands,
        low_copies=low_copies,
        keep=inner.identity and not any(operands),
    )


@structural_rule(*CALLS)
def _call(planner, eqn, states, region, wanted):
    jaxpr = eqn.params[inner_jaxpr_key(eqn.params)]
    inner = planner.plan(jaxpr, states, wanted, region.names)
    operands = _read_low(inner, states, region)
    if any(operands):
        inner = planner.plan(jaxpr, _cast(states, operands), wanted, region.names)
    return _around(inner, operands, _invariant_copies(inner, states))


@structural_rule(*CUSTOM_RULES)
def _custom_derivative(planner, eqn, states, region, wanted):
    jaxpr = eqn.params[inner_jaxpr_key(eqn.params)]
    inner = planner.plan(jaxpr, states, wanted, region.names)
    # A leaf that the inside reads in 16 bits alone is cast before: the user's rule then gets,
    # and keeps for the backward pass, the copy that everyone else reads.
    low = dict(inner.low_copies)
    operands = [
        low.get(i) if inner.demands[i] is Demand.LOW and s.leaf else d
        for i, (s, d) in enumerate(zip(states, _read_low(inner, states, region), strict=True))
    ]
    if any(operands):
        inner = planner.plan(jaxpr, _cast(states, operands), wanted, region.names)
    return _around(inner, operands)


@structural_rule("custom_vmap_call", "shard_map")
def _isolated_call(planner, eqn, states, region, wanted):
    key = "call" if eqn.primitive.name == "custom_vmap_call" else inner_jaxpr_key(eqn.params)
    inner = planner.plan(eqn.params[key], states, wanted, region.names)
    return _around(inner, [None] * len(states))


@structural_rule("scan")
def _scan(planner, eqn, states, region, wanted):
    consts, count = scan_split(eqn.params)
    end = consts + count
    jaxpr, body = eqn.params["jaxpr"], body_of(eqn.params["jaxpr"])
    accumulating = accumulating_carries(body, consts, count)
    carries = first_guess(
        body.invars[consts:end],
        states[consts:end],
        accumulating,
        region.low,
        planner.policy.data_abstains,
    )
    declared = [float_dtype(v.aval) for v in body.invars[consts:end]]
    widened = _widened(states[:consts])
    given = _invariants(_as_parameters(states[:consts], widened))
    xs, ys = states[end:], wanted[count:]

    def plan_body(carries: Sequence[np.dtype | None], returned: Sequence[Wanted]) -> Plan:
        inputs = [*given, *map(ValueState, carries), *xs]
        return planner.plan(jaxpr, inputs, [*returned, *ys], region.names)

    def returned_by_body(carries: Sequence[np.dtype | None]) -> Sequence[ValueState]:
        free = [Wanted(None if d != e else d) for d, e in zip(carries, declared, strict=True)]
        return plan_body(carries, free).outputs[:count]

    carries = settled(carries, declared, states[consts:end], returned_by_body)
    returned = [Wanted(d) for d in carries]
    inner = plan_body(carries, returned)
    # A slice of data is cast with its siblings, before the loop; one of a stacked parameter inside,
    # where a copy of all layers never exists at once.
    operands = [*widened, *(None,) * (len(states) - consts)]
    operands[end:] = _read_low(inner, states, region, (None, Leaf.DATA))[end:]
    if any(operands[end:]):
        xs = _cast(xs, operands[end:])
        inner = plan_body(carries, returned)
    operands[consts:end] = [
        d if s.dtype is not None and s.dtype != d else None
        for s, d in zip(states[consts:end], carries, strict=True)
    ]
    return EquationPlan(
        tuple(operands),
        (*map(ValueState, carries), *_computed(inner.outputs[count:])),
        _carry_reason(carries, declared, accumulating, consts),
        inner=(inner,),
        demands=(
            *inner.demands[:consts],
            *(Demand.of(d) for d in carries),
            *inner.demands[end:],
        ),
        low_copies=tuple((i, d) for i, d in inner.low_copies if i < consts),
        keep=inner.identity and not any(operands),
    )


def _carry_reason(
    carries: Sequence[np.dtype | None],
    declared: Sequence[np.dtype | None],
    accumulating: frozenset[int],
    first: int,
) -> Reason:
    """Why carries are float32; ``first`` is the position of the first one among the operands."""
    kept = [k for k, (d, e) in enumerate(zip(carries, declared, strict=True)) if e and d == e]
    if accumulated := [k for k in kept if k in accumulating]:
        cause = f"carries {accumulated} accumulate"
        return Reason(Code.CARRY_ACCUMULATOR, cause, tuple(first + k for k in accumulated))
    if kept:
        cause = f"carries {kept} are float32 at the start or in the body"
        return Reason(Code.CARRY, cause, tuple(first + k for k in kept))
    return _INSIDE


@structural_rule("while")
def _while(planner, eqn, states, region, wanted):
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = cond_consts + body_consts
    carry_vars = eqn.invars[start:]
    carry = _declared(body_of(eqn.params["body_jaxpr"]).invars[body_consts:])
    cond = planner.plan(
        eqn.params["cond_jaxpr"],
        [*_invariants(states[:cond_consts]), *carry],
        [Wanted()],
        region.names,
    )
    body = planner.plan(
        eqn.params["body_jaxpr"],
        [*_invariants(states[cond_consts:start]), *carry],
        _returned_as_declared(body_of(eqn.params["body_jaxpr"]).outvars),
        region.names,
    )
    operands = [*(None,) * start, *_restored(carry_vars, states[start:])]
    kept = tuple(start + k for k, v in enumerate(carry_vars) if float_dtype(v.aval))
    return EquationPlan(
        tuple(operands),
        tuple(_declared(eqn.outvars)),
        Reason(Code.CARRY, "carries keep their declared dtypes", kept),
        inner=(cond, body),
        demands=(
            *cond.demands[:cond_consts],
            *body.demands[:body_consts],
            *_full_if_float(carry_vars),
        ),
        low_copies=(
            *((i, d) for i, d in cond.low_copies if i < cond_consts),
            *((cond_consts + i, d) for i, d in body.low_copies if i < body_consts),
        ),
        keep=cond.identity and body.identity and not any(operands),
    )


@structural_rule("cond")
def _cond(planner, eqn, states, region, wanted):
    branches = eqn.params["branches"]
    plans = [planner.plan(b, states[1:], wanted, region.names) for b in branches]
    joined, reason = [], _INSIDE
    for k, want in enumerate(wanted):
        dtypes = {plan.outputs[k].dtype for plan in plans}
        if len(dtypes) > 1:
            joined.append(Wanted(dtype=FLOAT32))
            reason = Reason(Code.BRANCH_JOIN, f"the branches disagree on result {k}")
        else:
            joined.append(want)
    if tuple(joined) != wanted:
        plans = [planner.plan(b, states[1:], joined, region.names) for b in branches]
    demands = [Demand.NONE] * len(states)
    for plan in plans:
        for i, demand in enumerate(plan.demands):
            demands[1 + i] |= demand
    return EquationPlan(
        (None,) * len(states),
        tuple(ValueState(s.dtype) for s in plans[0].outputs),
        reason,
        inner=tuple(plans),
        demands=tuple(demands),
        low_copies=tuple(
            dict.fromkeys(
                (1 + i, d) for plan in plans for i, d in _invariant_copies(plan, states[1:])
            )
        ),
        keep=all(plan.identity for plan in plans),
    )


@structural_rule("optimization_barrier")
def _operand_by_operand(planner, eqn, states, region, wanted):
    # A leaf stays one: a parameter behind a barrier has no vote, and its gradients add in float32.
    unchanged = not any(_restored(eqn.invars, states))
    return EquationPlan((None,) * len(states), tuple(states), _INSIDE, keep=unchanged)


@structural_rule("leaf_view", "cpu_barrier", "accumulate")
def _ours(planner, eqn, states, region, wanted):
    return keep(eqn, states, Reason(Code.KEEP, "made by autocast"))
