"""Plans of loops: the dtype of each carry, and casts before the loop instead of in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

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
from .mark_sweep import accumulated_in, inputs_of, residual_streams
from .marks import PARAMETER, Marks
from .need_sweep import needs_in_bodies
from .needs import Need
from .structural import (
    INSIDE,
    Plans,
    cast_states,
    loop_invariants,
    plans,
    read_low,
    stacked_states,
)
from .votes import literal_guard


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


@plans("scan")
def _scan(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a scan: constants are cast before it; each carry has one dtype in all iterations."""
    (body,), given = bodies(ctx.eqn), ctx.given
    start, end = body.fixed, body.fixed + len(body.carries)
    initial = given[start:end]
    # A 16-bit value from before the loop is widened once, so that the gradients of all steps add up
    # in float32. Each step reads the 16-bit value through a `source_view`.
    constants = given[:start]
    widened = [FLOAT32 if s.source is None and is_16_bit(s.dtype) else None for s in constants]
    fixed = loop_invariants(map(_before_the_loop, constants))
    tagged = [(s, s.tag) for s in given[end:]]
    xs = [s if tag is None else dataclasses.replace(s, tag=tag.sliced()) for s, tag in tagged]
    ys = ctx.requests[len(initial) :]
    accumulating = _accumulating(planner, ctx, body)
    needs = _needs_of_carries(planner, ctx)
    marks = inputs_of(body, ctx.marks, planner.memo)[start:end]

    def plan_body(carries: Sequence[np.dtype | None], returned: Sequence[Request]) -> Plan:
        inputs = [*fixed, *_carried(carries, accumulating, marks), *xs]
        pairs = zip(returned, needs, strict=True)
        requests = [request._replace(needs=need) for request, need in pairs]
        return planner.plan(body.jaxpr, inputs, [*requests, *ys], ctx.region.names)

    # The dtypes of the carries decide the dtypes in the body, and the body those of the carries:
    # both are settled before the plan is used.
    carries, reason = _carries(ctx, body, accumulating, plan_body)
    returned = [Request(d) for d in carries]
    inner = plan_body(carries, returned)
    # Stacked data is cast before the loop, all slices at once. A stacked parameter is cast slice by
    # slice in the loop, so that no 16-bit copy of all layers exists.
    operands = [*widened, *(None,) * (len(given) - start)]
    operands[end:] = read_low(inner, ctx, (None, Source.DATA))[end:]
    if any(operands[end:]):
        xs = cast_states(xs, operands[end:])
        inner = plan_body(carries, returned)
    # The initial value is cast before the loop to the dtype of the carry.
    operands[start:end] = [
        d if s.dtype is not None and s.dtype != d else None
        for s, d in zip(initial, carries, strict=True)
    ]
    return EquationPlan(
        Inside((inner,), inner.identity and not any(operands)),
        given,
        tuple(operands),
        (*map(ValueState, carries), *stacked_states(inner.outputs[len(carries) :])),
        reason,
    )


def _carried(
    dtypes: Sequence[np.dtype | None],
    accumulating: Collection[int],
    marks: Sequence[Marks],
) -> list[ValueState]:
    """Returns the states of a loop's carries in its body; ``marks`` are those of the carries."""
    pairs = enumerate(zip(dtypes, marks, strict=True))
    return [ValueState(d, marks=m._replace(summed=k in accumulating)) for k, (d, m) in pairs]


def _needs_of_carries(planner: Plans, ctx: Context) -> list[int]:
    """Returns the needs of the carries, in the next iteration and after the loop."""
    of_results = [Need(request.needs) for request in ctx.requests]
    *_, last = needs_in_bodies(ctx.eqn, of_results, planner.memo, ctx.marks, ctx.region.names)
    return [int(last.returned[k]) for _, k in last.body.carries]


def _accumulating(planner: Plans, ctx: Context, body: Body) -> frozenset[int]:
    """Returns the carries of a scan that add up over its iterations."""
    found = accumulated_in(body, planner.memo)
    if not ctx.policy.data_abstains:
        return found
    # At level "compute" a residual stream is 16 bits by intent, also in a scan over layers: with a
    # float32 carry, a TPU moved 1.12 times the bytes of the hand-written model. A parameter that
    # was cast before a function with a derivative rule is a computed value in the function, where
    # only its marks identify it.
    parameters = frozenset(
        i
        for i, (state, m) in enumerate(zip(ctx.given, ctx.marks, strict=True))
        if state.source is Source.PARAM or m.given == PARAMETER.given
    )
    return found - residual_streams(body, parameters)


def _carries(
    ctx: Context, body: Body, accumulating: frozenset[int], plan_body: Callable[..., Plan]
) -> tuple[list[np.dtype | None], Reason]:
    """Returns dtypes in which the body of a scan both takes and returns each carry, and a reason.

    The search starts with the narrowest dtypes. It ends: each round gives at least one more carry
    its declared dtype, for good.

    Args:
        ctx: The scan.
        body: Its body.
        accumulating: The indices of the carries that accumulate.
        plan_body: Plans the body for dtypes of the carries and requests for its outputs.
    """
    start, count = body.fixed, len(body.carries)
    initial = ctx.given[start : start + count]
    declared = list(map(ctx.declared, body_of(body.jaxpr).invars[start : start + count]))
    carries = [
        ctx.compute_dtype if k not in accumulating and _starts_low(ctx, d, s) else d
        for k, (d, s) in enumerate(zip(declared, initial, strict=True))
    ]
    while carries != declared:
        # The body gets a request for each carry that has its declared dtype. A carry that is tried
        # in 16 bits gets no request, to see which dtype the body returns.
        free = [Request(d if d == e else None) for d, e in zip(carries, declared, strict=True)]
        outputs = plan_body(carries, free).outputs[:count]
        states = zip(carries, declared, outputs, initial, strict=True)
        joined = [d if _can_be(d, s, i) else e for d, e, s, i in states]
        if joined == carries:
            break
        carries = joined
    return carries, _carry_reason(carries, declared, accumulating, start)


def _starts_low(ctx: Context, declared: np.dtype | None, state: ValueState) -> bool:
    """Whether a carry may be 16-bit; planning the body can only raise it.

    Its initial value is computed in 16 bits, or is a source without a vote, such as zeros. A carry
    that accumulates over the iterations stays float32: over 2,048 steps a 16-bit sum loses three
    quarters of its value.
    """
    compute_dtype = ctx.region.compute_dtype
    if compute_dtype is None or declared != FLOAT32:
        return False
    # A carry that starts at a number beyond 16 bits stays float32. In float16 a running maximum
    # that starts at finfo(float32).min would be -inf, and exp(-inf + inf) is NaN.
    if literal_guard([state], compute_dtype) is not None:
        return False
    voting = (None,) if ctx.policy.data_abstains else (None, Source.DATA)
    return state.dtype == compute_dtype or state.source not in voting


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
    if returned.dtype in (None, dtype):
        return True
    if returned.source in (None, Source.DATA) or dtype is None:
        return False
    if returned.source is Source.PARAM and initial.source is not None:
        return False
    return dtype == FLOAT32 or literal_guard([returned], dtype) is None


def _carry_reason(
    carries: Sequence[np.dtype | None],
    declared: Sequence[np.dtype | None],
    accumulating: frozenset[int],
    start: int,
) -> Reason:
    """Returns why carries are float32; ``start`` is the position of the first initial value."""
    kept = [k for k, (d, e) in enumerate(zip(carries, declared, strict=True)) if e and d == e]
    code, why = ReasonCode.CARRY, "are float32 at the start or in the body"
    if accumulated := [k for k in kept if k in accumulating]:
        kept, code, why = accumulated, ReasonCode.CARRY_ACCUMULATOR, "accumulate"
    positions = tuple(start + k for k in kept)
    return Reason(code, f"carries {kept} {why}", positions) if kept else INSIDE


@plans("while")
def _while(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans a while loop, whose number of steps is unknown: carries keep their declared dtypes.

    A rounding to bfloat16 in each step, by up to 2**-9 of the value, may lose all of it after 512
    steps.
    """
    held, given = bodies(ctx.eqn), ctx.given
    inner = []
    dtypes = [ctx.declared(v) for v in ctx.eqn.outvars]
    needs = _needs_of_carries(planner, ctx)
    for body in held:
        constants = body.operands[: body.fixed]
        inputs = loop_invariants([given[i] for i in constants])
        marks = inputs_of(body, ctx.marks, planner.memo)[body.fixed :]
        inputs += _carried(dtypes, accumulated_in(body, planner.memo), marks)
        returned = [
            Request() if r is None else Request(dtype=dtypes[k], needs=needs[k])
            for k, r in enumerate(body.results)
        ]
        inner.append(planner.plan(body.jaxpr, inputs, returned, ctx.region.names))
    start = sum(body.fixed for body in held)
    pairs = zip(dtypes, given[start:], strict=True)
    restored = [None if dtype == state.dtype else dtype for dtype, state in pairs]
    unchanged = all(plan.identity for plan in inner) and not any(restored)
    kept = tuple(i for i in range(start, len(given)) if ctx.declared(ctx.eqn.invars[i]))
    return EquationPlan(
        Inside(tuple(inner), unchanged),
        given,
        (*(None,) * start, *restored),
        tuple(map(ValueState, dtypes)),
        Reason(ReasonCode.CARRY, "carries keep their declared dtypes", kept),
    )
