"""Plans of loops: the dtype of each carry, and what is cast before the loop instead of in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import body_of
from ..primitives.structure import Body, bodies
from .basic_plans import as_declared
from .data import (
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
from .loop_carries import accumulating_carries, first_guess, settled
from .region import Region
from .structural import (
    INSIDE,
    PlansBodies,
    cast_states,
    computed_states,
    full_if_float,
    loop_invariants,
    plans,
    read_low,
)


def _widened(states: Sequence[ValueState]) -> list[np.dtype | None]:
    """Returns the casts of what is computed in 16 bits before a loop and read in it."""
    return [FLOAT32 if s.source is None and s.dtype in COMPUTE_DTYPES else None for s in states]


def _as_parameters(
    states: Sequence[ValueState], casts: Sequence[np.dtype | None]
) -> list[ValueState]:
    """Returns what is known, inside a loop, of what is computed before it: used like a parameter.

    Each step reads a view of one 16-bit copy, and the gradients of the steps add up in float32.
    Added up in 16 bits, 2,048 steps lost four fifths of the gradient of a normalized weight.
    """

    def parameter(state: ValueState, cast: np.dtype | None) -> ValueState:
        dtype = cast or state.dtype
        if dtype != FLOAT32 or state.source is not None:
            return state
        return dataclasses.replace(state, dtype=FLOAT32, source=Source.PARAM)

    return [parameter(state, cast) for state, cast in zip(states, casts, strict=True)]


@plans("scan")
def _scan(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """A scan: constants are cast before it, carries get the dtype in which they go round."""
    (body,) = bodies(eqn)
    start, end = body.fixed, body.fixed + len(body.carries)
    initial = given[start:end]
    widened = _widened(given[:start])
    fixed = loop_invariants(_as_parameters(given[:start], widened))
    xs, ys = given[end:], wants[len(initial) :]

    def plan_body(carries: Sequence[np.dtype | None], returned: Sequence[Want]) -> Plan:
        inputs = [*fixed, *map(ValueState, carries), *xs]
        return planner.plan(body.jaxpr, inputs, [*returned, *ys], region.names)

    carries, reason = _carries(planner, body, initial, region, plan_body)
    returned = [Want(d) for d in carries]
    inner = plan_body(carries, returned)
    # A slice of data is cast with its siblings, before the loop; one of a stacked parameter inside,
    # where a copy of all layers never exists at once.
    operands = [*widened, *(None,) * (len(given) - start)]
    operands[end:] = read_low(inner, given, region, (None, Source.DATA))[end:]
    if any(operands[end:]):
        xs = cast_states(xs, operands[end:])
        inner = plan_body(carries, returned)
    operands[start:end] = [
        d if s.dtype is not None and s.dtype != d else None
        for s, d in zip(initial, carries, strict=True)
    ]
    copies = tuple((i, d) for i, d in inner.source_copies if i < start)
    of_carries = [Demand.of(d) for d in carries]
    return EquationPlan(
        Inside((inner,), copies, inner.identity and not any(operands)),
        tuple(given),
        tuple(operands),
        (*map(ValueState, carries), *computed_states(inner.outputs[len(carries) :])),
        reason,
        demands=(*inner.demands[:start], *of_carries, *inner.demands[end:]),
    )


def _carries(
    planner: PlansBodies,
    body: Body,
    initial: Sequence[ValueState],
    region: Region,
    plan_body: Any,
) -> tuple[list[np.dtype | None], Reason]:
    """Returns the dtype of each carry of a scan, and why those that are float32 are."""
    start, count = body.fixed, len(initial)
    variables = body_of(body.jaxpr).invars[start : start + count]
    declared = [float_dtype(v.aval) for v in variables]
    accumulating = accumulating_carries(body_of(body.jaxpr), start, count)
    abstains = planner.policy.data_abstains
    guess = first_guess(variables, initial, accumulating, region.compute_dtype, abstains)

    def returned_by_body(carries: Sequence[np.dtype | None]) -> Sequence[ValueState]:
        free = [Want(None if d != e else d) for d, e in zip(carries, declared, strict=True)]
        return plan_body(carries, free).outputs[:count]

    carries = settled(guess, declared, initial, returned_by_body)
    return carries, _carry_reason(carries, declared, accumulating, start)


def _carry_reason(
    carries: Sequence[np.dtype | None],
    declared: Sequence[np.dtype | None],
    accumulating: frozenset[int],
    start: int,
) -> Reason:
    """Returns why carries are float32; ``start`` is the position of the first carry's operand."""
    kept = [k for k, (d, e) in enumerate(zip(carries, declared, strict=True)) if e and d == e]
    if accumulated := [k for k in kept if k in accumulating]:
        cause = f"carries {accumulated} accumulate"
        positions = tuple(start + k for k in accumulated)
        return Reason(ReasonCode.CARRY_ACCUMULATOR, cause, positions)
    if kept:
        cause = f"carries {kept} are float32 at the start or in the body"
        return Reason(ReasonCode.CARRY, cause, tuple(start + k for k in kept))
    return INSIDE


@plans("while")
def _while(
    planner: PlansBodies,
    eqn: Any,
    given: Sequence[ValueState],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """A while loop: nobody knows how often it runs, so all its carries keep their declared dtypes.

    Half an ulp of bfloat16 a step, 2**-9 of the value, is all of it after 512 steps.
    """
    held = bodies(eqn)
    inner, demands, copies = [], full_if_float(eqn.invars), []
    start = sum(body.fixed for body in held)
    for body in held:
        jaxpr, fixed = body_of(body.jaxpr), [given[i] for i in body.operands[: body.fixed]]
        carries = [ValueState(float_dtype(v.aval)) for v in jaxpr.invars[body.fixed :]]
        returned = [
            Want() if r is None else Want(dtype=float_dtype(v.aval))
            for v, r in zip(jaxpr.outvars, body.results, strict=True)
        ]
        inputs = [*loop_invariants(fixed), *carries]
        plan = planner.plan(body.jaxpr, inputs, returned, region.names)
        inner.append(plan)
        for i, demand in zip(body.operands[: body.fixed], plan.demands[: body.fixed], strict=True):
            demands[i] = demand
        copies += [(body.operands[i], d) for i, d in plan.source_copies if i < body.fixed]
    operands = [None if i < start else d for i, d in enumerate(as_declared(eqn, given))]
    kept = tuple(i for i in range(start, len(given)) if float_dtype(eqn.invars[i].aval))
    return EquationPlan(
        Inside(
            tuple(inner),
            tuple(copies),
            all(plan.identity for plan in inner) and not any(operands),
        ),
        tuple(given),
        tuple(operands),
        tuple(ValueState(float_dtype(v.aval)) for v in eqn.outvars),
        Reason(ReasonCode.CARRY, "carries keep their declared dtypes", kept),
        demands=tuple(demands),
    )
