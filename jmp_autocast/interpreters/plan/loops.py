"""Plans of loops: the dtype of each carry, and casts before the loop instead of in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ...policies import FLOAT32
from ..compat import body_of
from ..primitives.structure import Body, bodies
from .avals import is_16_bit
from .data import (
    Context,
    EquationPlan,
    Inside,
    Plan,
    Reason,
    ReasonCode,
    Request,
    Source,
    ValueState,
)
from .mark_sweep import accumulated_in, inputs_of
from .marks import NONE, PARAMETER
from .need_sweep import needs_in_bodies
from .needs import Need
from .structural import INSIDE, Plans, cast_states, plans, read_low
from .votes import literal_guard

_Dtypes = Sequence[np.dtype | None]


def _before_the_loop(state: ValueState) -> ValueState:
    """Returns the state that a float32 value from before a scan has in its body, as a source.

    Each step reads one 16-bit copy of a source through a `source_view`, and the gradients of the
    steps add up in float32. When they were added up in 16 bits, 2,048 steps lost four fifths of the
    gradient of a normalized weight.
    """
    if state.source is not None or state.dtype is None:
        return state
    # A float32 value from before the loop votes in the body, as data does: if computed times were
    # rounded as a bias is, the phase of a cosine changed by 2**-11 of the time. A widened 16-bit
    # value can be rounded again without loss.
    if not is_16_bit(state.dtype):
        return dataclasses.replace(state, source=Source.DATA)
    return dataclasses.replace(state, dtype=FLOAT32, source=Source.PARAM, may_be_rounded=True)


def _entering(
    planner: Plans,
    ctx: Context,
    body: Body,
    constants: Sequence[ValueState],
    carries: _Dtypes,
) -> list[ValueState]:
    """Returns the states of a loop's constants and carries in its body."""
    # Each source is loop-invariant in the body.
    fixed = [dataclasses.replace(s, loop_invariant=True) if s.source else s for s in constants]
    marks = inputs_of(body, ctx.marks, planner.memo)[body.fixed :]
    return [*fixed, *[ValueState(d, marks=m) for d, m in zip(carries, marks, strict=False)]]


def _needs_of_carries(planner: Plans, ctx: Context) -> list[Need]:
    """Returns the needs of the carries, in the next iteration and after the loop."""
    of_results = [request.needs for request in ctx.requests]
    *_, last = needs_in_bodies(ctx.eqn, of_results, planner.memo, ctx.marks, ctx.region.names)
    return [last.returned[k] for _, k in last.body.carries]


@plans("scan")
def _scan(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a scan: constants are cast before it; each carry has one dtype in all iterations."""
    (body,), given = bodies(ctx.eqn), ctx.given
    start, end = body.fixed, body.fixed + len(body.carries)
    constants = list(map(_before_the_loop, given[:start]))
    xs = [dataclasses.replace(s, tag=s.tag.sliced()) if s.tag else s for s in given[end:]]
    needs = _needs_of_carries(planner, ctx)
    accumulating = _accumulating(planner, ctx, body)

    def plan_body(carries: _Dtypes, returned: _Dtypes) -> Plan:
        inputs = _entering(planner, ctx, body, constants, carries)
        requests = [*map(Request, returned, needs), *ctx.requests[len(needs) :]]
        return planner.plan(body.jaxpr, [*inputs, *xs], requests, ctx.region.names)

    # The dtypes of the carries decide the dtypes in the body, and the body those of the carries:
    # both are settled before the plan is used.
    carries = _carries(ctx, body, accumulating, plan_body)
    inner = plan_body(carries, carries)
    # Stacked data is cast before the loop, all slices at once. A stacked parameter is cast slice by
    # slice in the loop, so that no 16-bit copy of all layers exists.
    stacked = read_low(inner, ctx, (None, Source.DATA))[end:]
    if any(stacked):
        xs = cast_states(xs, stacked)
        inner = plan_body(carries, carries)
    # A 16-bit constant is widened once, so that the gradients of all steps add up in float32. The
    # initial value of a carry is cast to the dtype of the carry.
    dtypes = [*[state.dtype for state in constants], *carries]
    casts = [d if d != s.dtype else None for d, s in zip(dtypes, given, strict=False)]
    # Stacked outputs have the facts about one slice, without those that hold in one iteration.
    ys = [
        dataclasses.replace(s, loop_invariant=False, tag=None, marks=NONE)
        for s in inner.outputs[len(carries) :]
    ]
    return EquationPlan(
        Inside((inner,), inner.identity and not any(casts) and not any(stacked)),
        given,
        (*casts, *stacked),
        (*map(ValueState, carries), *ys),
        _reason(ctx, carries, accumulating, start),
    )


def _accumulating(planner: Plans, ctx: Context, body: Body) -> frozenset[int]:
    """Returns the carries of a scan that add up over its iterations."""
    if not ctx.policy.data_abstains:
        return accumulated_in(body, planner.memo)
    # At level "compute" a residual stream is 16 bits by intent, also in a scan over layers: with a
    # float32 carry, a TPU moved 1.12 times the bytes of the hand-written model. A parameter that
    # was cast before a function with a derivative rule is a computed value in the function, where
    # only its marks identify it.
    states = enumerate(zip(ctx.given, ctx.marks, strict=True))
    found = [i for i, (s, m) in states if s.source is Source.PARAM or m.given == PARAMETER.given]
    return accumulated_in(body, planner.memo, frozenset(found))


def _carries(
    ctx: Context, body: Body, accumulating: frozenset[int], plan_body: Callable[..., Plan]
) -> _Dtypes:
    """Returns dtypes in which the body of a scan both takes and returns each carry.

    The search starts with the narrowest dtypes. It ends: each round gives at least one more carry
    its declared dtype, for good.

    Args:
        ctx: The scan.
        body: Its body.
        accumulating: The indices of the carries that accumulate.
        plan_body: Plans the body for dtypes of its carries and of the carries that it returns.
    """
    inputs = slice(body.fixed, body.fixed + len(body.carries))
    initial = ctx.given[inputs]
    declared = list(map(ctx.declared, body_of(body.jaxpr).invars[inputs]))
    carries = [
        ctx.compute_dtype if k not in accumulating and _starts_low(ctx, d, s) else d
        for k, (d, s) in enumerate(zip(declared, initial, strict=True))
    ]
    while carries != declared:
        # The body gets a request for each carry that has its declared dtype. A carry that is tried
        # in 16 bits gets no request, to see which dtype the body returns.
        free = [d if d == e else None for d, e in zip(carries, declared, strict=True)]
        states = zip(carries, declared, plan_body(carries, free).outputs, initial, strict=False)
        joined = [d if _can_be(d, s, i) else e for d, e, s, i in states]
        if joined == carries:
            break
        carries = joined
    return carries


def _starts_low(ctx: Context, declared: np.dtype | None, state: ValueState) -> bool:
    """Whether a carry may be 16-bit; planning the body can only raise it.

    Its initial value is computed in 16 bits, or is a source without a vote, such as zeros. A carry
    that accumulates over the iterations stays float32: over 2,048 steps a 16-bit sum loses three
    quarters of its value.
    """
    if not ctx.region.lowers or declared != FLOAT32:
        return False
    # A carry that starts at a number beyond 16 bits stays float32. In float16 a running maximum
    # that starts at finfo(float32).min would be -inf, and exp(-inf + inf) is NaN.
    if literal_guard([state], ctx.compute_dtype) is not None:
        return False
    voting = (None,) if ctx.policy.data_abstains else (None, Source.DATA)
    return state.dtype == ctx.compute_dtype or state.source not in voting


def _can_be(dtype: np.dtype | None, returned: ValueState, initial: ValueState) -> bool:
    """Returns whether a carry can have a dtype, even if its body returns another.

    A source that the body returns, such as zeros that reset a state, can be cast if the dtype holds
    its value. Data cannot: the next iteration computes with it. A parameter can be cast if the
    initial value is computed; if it is a source as well, the loop may only pass an argument on,
    which must not be rounded.

    Args:
        dtype: The dtype.
        returned: The state of the body's output.
        initial: The state of the initial value.
    """
    if dtype is None or returned.dtype == dtype:
        return True
    if returned.source in (None, Source.DATA):
        return False
    if returned.source is Source.PARAM and initial.source is not None:
        return False
    return literal_guard([returned], dtype) is None


def _reason(ctx: Context, carries: _Dtypes, accumulating: frozenset[int], start: int) -> Reason:
    """Returns why carries keep their dtypes; ``start`` is the position of the first one."""
    pairs = enumerate(zip(carries, ctx.eqn.outvars, strict=False))
    kept = [k for k, (dtype, v) in pairs if dtype is not None and dtype == ctx.declared(v)]
    code, why = ReasonCode.CARRY, "keep their declared dtypes"
    if accumulated := [k for k in kept if k in accumulating]:
        kept, code, why = accumulated, ReasonCode.CARRY_ACCUMULATOR, "accumulate"
    positions = tuple([start + k for k in kept])
    return Reason(code, f"carries {kept} {why}", positions) if kept else INSIDE


@plans("while")
def _while(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a while loop, whose number of steps is unknown: carries keep their declared dtypes.

    A rounding to bfloat16 in each step, by up to 2**-9 of the value, may lose all of it after 512
    steps.
    """
    dtypes = list(map(ctx.declared, ctx.eqn.outvars))
    returned = list(map(Request, dtypes, _needs_of_carries(planner, ctx)))
    start, inner = len(ctx.given) - len(dtypes), []
    for body in bodies(ctx.eqn):
        constants = [ctx.given[i] for i in body.operands[: body.fixed]]
        inputs = _entering(planner, ctx, body, constants, dtypes)
        requests = [Request()] if None in body.results else returned
        inner.append(planner.plan(body.jaxpr, inputs, requests, ctx.region.names))
    pairs = zip(dtypes, ctx.given[start:], strict=True)
    restored = [None if dtype == state.dtype else dtype for dtype, state in pairs]
    return EquationPlan(
        Inside(tuple(inner), all(plan.identity for plan in inner) and not any(restored)),
        ctx.given,
        (*(None,) * start, *restored),
        tuple(map(ValueState, dtypes)),
        _reason(ctx, dtypes, frozenset(), start),
    )
