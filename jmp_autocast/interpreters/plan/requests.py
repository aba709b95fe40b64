"""Requests of consumers to the producer of a value: a sweep from the last equation to the first.

Example: in ``exp(x - max(x))``, a float32 ``exp`` reads a difference of 16-bit values. By vote the
difference would be 16-bit, and its error multiplies the result; so ``exp`` requests it in float32,
which costs a cast that XLA fuses.

An equation gets a request for a need of its consumers, or else for the dtype that all of them read,
unless a function of `REFUSALS` refuses it. A call gets a request for each result, and its body is
planned for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, variables_in
from ..primitives.picking import picks
from ..primitives.traits import having
from .avals import at_least, element_count, is_16_bit
from .consumers import Consumers, Uses
from .data import Context, EquationPlan, ReasonCode, Request, Use, ValueState
from .needs import HARMED, NOTHING, RAISED, ROWS, Need, Needs
from .votes import is_stream

_CLEARS = having("clears")
_FEEDS = having("feeds")
_FUSES = having("fuses")
_MOVES = having("moves")
_ROUNDS = having("rounds")
_NO_REQUEST = Request()
_ONE_DTYPE = (Use.LOW, Use.FULL)


def _request(ctx: Context, use: Use, consumer: str) -> Request:
    return Request(None, use, int(ctx.need), 0, consumer)


# --- requests, in this order ----------------------------------------------------------------


def _by_need(ctx: Context, dtype: np.dtype | None) -> Request | None:
    """A producer is raised to float32 for a need of its consumers, whatever their dtypes are."""
    needed = ctx.need & RAISED.get(ctx.name, NOTHING)
    if not needed or not is_16_bit(dtype):
        return None
    row = next(row for row in ROWS if needed & row.need)
    return _request(ctx, Use.FULL, row.consumer)


def _by_all_consumers(ctx: Context, dtype: np.dtype | None, reads: Uses) -> Request | None:
    """Requests the dtype that all consumers read: float32 costs nothing if none reads 16 bits.

    A value that is only moved on its way to a product is not raised: in float32, the residual
    stream of a ViT took over the layout of its patch convolution, for 5 to 10 % of a TPU's step.
    """
    use = reads.use
    if use not in _ONE_DTYPE or use is Use.of(dtype):
        return None
    is_moved = ctx.need & (Need.LEADS | Need.COMPUTED) == Need.LEADS
    return None if use is Use.FULL and is_moved else _request(ctx, use, reads.first)


# --- refusals: a float32 array would be stored, or nothing is gained -------------------------


def _is_stream(ctx: Context, plan: EquationPlan, request: Request) -> bool:
    """At level "compute" a residual stream stays 16-bit, as in a model with ``dtype=`` by hand.

    The stream of a convolutional network stays 16-bit at every level, also if a norm reads it in
    float32, unless its rounding would harm a consumer.
    """
    if not is_stream(ctx):
        return False
    if ctx.policy.data_abstains:
        # A sum that the plan computes in float32 and then rounds (`rounded_stream`) may get
        # requests.
        return not plan.casts
    return request.use is Use.FULL and not ctx.need & HARMED


def _is_gated_summand(ctx: Context, plan: EquationPlan, request: Request) -> bool:
    """A gated summand stays 16-bit: a float32 ``sigmoid(a) * b`` would widen both factors."""
    is_gated = ctx.name == "mul" and plan.reason.code is ReasonCode.PROMOTE_LOW
    only_sums = not ctx.need & Need.BEYOND_SUMS
    return is_gated and only_sums and _computed(ctx) > 1


def _cannot_follow(ctx: Context, plan: EquationPlan, request: Request) -> bool:
    """An equation keeps its dtype if a rule, a scope or the user sets it, or a cast costs less."""
    code = plan.reason.code
    if request.use is Use.LOW:
        # Lowering replaces the cast of the result by a cast of each computed operand. This costs
        # less only if one operand is computed, and is no larger than the result: a cast of a row
        # costs less than a cast of the buffer that holds it.
        clears = ctx.name in _CLEARS and not (ctx.name in _MOVES and _shrinks(ctx.eqn))
        return not (code is ReasonCode.PROMOTE_FULL and clears and _computed(ctx) == 1)
    # Only equations that are 16-bit by vote are raised, not by a rule, a scope or the user. They
    # must be cheap, as a float32 `sin` costs more than a cast of its result, or compute digits that
    # a consumer needs.
    needed = ctx.need & HARMED & RAISED.get(ctx.name, NOTHING)
    is_needed = needed and ctx.name not in _ROUNDS
    is_cheap = ctx.name in _FEEDS or picks(ctx.eqn)
    return not (code is ReasonCode.PROMOTE_LOW and (is_cheap or is_needed))


def _computed(ctx: Context) -> int:
    """Returns the number of computed operands, each counted once."""
    pairs = zip(ctx.eqn.invars, ctx.given, strict=True)
    return len({v for v, state in pairs if state.is_computed})


def _shrinks(eqn: JaxprEqn) -> bool:
    """Whether an operand has more elements than the results together."""
    results = sum(map(element_count, eqn.outvars))
    return not all(at_least(results, element_count(v)) for v in variables_in(eqn.invars))


REFUSALS: tuple[Callable[[Context, EquationPlan, Request], bool], ...] = (
    _is_stream,
    _is_gated_summand,
    _cannot_follow,
)


# --- the sweep ------------------------------------------------------------------------------

Requests = Mapping[int, tuple[Request, ...]]


class Found(NamedTuple):
    """The result of a sweep.

    Args:
        requests: The requests for the results of an equation, by its index.
        shared: The operands of an equation with bodies, by its index, that other consumers also
            read in float32.
        consumers: How the equations, once they follow their requests, read each value.
    """

    requests: Requests
    shared: dict[int, frozenset[int]]
    consumers: Consumers


def find_requests(
    jaxpr: Jaxpr,
    contexts: Sequence[Context],
    equations: Sequence[EquationPlan],
    states: Mapping[Any, ValueState],
    output_requests: Sequence[Request],
    already: Requests,
    replanned: Callable[[int, tuple[Request, ...]], EquationPlan | None],
    needs: Needs,
) -> Found:
    """Finds the equations that should run in the dtype of their consumers.

    Args:
        jaxpr: The open jaxpr.
        contexts: Each equation in its context.
        equations: The plan of each equation.
        states: The state of each value.
        output_requests: The request for each output.
        already: The requests of earlier sweeps: no equation gets two.
        replanned: Plans the call at an index again for the requests for its results; returns None
            if its plan is for these.
        needs: The needs of each value.
    """
    requests: dict[int, tuple[Request, ...]] = {}
    consumers = Consumers(jaxpr, output_requests, needs)
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        plan, granted = equations[i], None
        if plan.inner:
            requested = tuple(
                [
                    _NO_REQUEST
                    if state.dtype is None or state.source is not None
                    else consumers.of(v).as_request(int(needs.get(v, NOTHING)))
                    for v, state in zip(eqn.outvars, plan.results, strict=True)
                ]
            )
            if (other := replanned(i, requested)) is not None:
                requests[i], plan = requested, other
        elif i not in already and len(plan.results) == 1 and plan.results[0].is_computed:
            ctx, dtype, reads = contexts[i], plan.results[0].dtype, consumers.of(eqn.outvars[0])
            request = _by_need(ctx, dtype) or _by_all_consumers(ctx, dtype, reads)
            if request and not any([refuses(ctx, plan, request) for refuses in REFUSALS]):
                requests[i] = granted = (request,)
        consumers.add(eqn, plan, granted)
    shared = _find_shared(jaxpr, equations, states, {**already, **requests}, consumers)
    return Found({**requests, **shared[0]}, shared[1], consumers)


# --- one cast for all float32 readers of a 16-bit value ------------------------------------------


def _find_shared(
    jaxpr: Jaxpr,
    equations: Sequence[EquationPlan],
    states: Mapping[Any, ValueState],
    requested: Requests,
    consumers: Consumers,
) -> tuple[dict[int, tuple[Request, ...]], dict[int, frozenset[int]]]:
    """Finds equations that should follow, not precede, the cast of a 16-bit value to float32.

    Rounding commutes with ``neg``, ``max`` or a transpose, so that the cast may come before or
    after them. If it comes after them, each cotangent is rounded before it is added to those of the
    other consumers. In ``max(z, 0) - z * y + log1p(exp(-abs(z)))`` three cotangents nearly cancel
    if a model is right: their sum is its error, ``sigmoid(z) - y``. In bfloat16 the gradient was
    off by 16 % for labels that are 0.01 off, and by 4 % for a contrastive loss, which reads logits
    and their transpose. So a value with several float32 consumers is cast once, before them, as
    logits are by hand and in PyTorch. A value with one float32 consumer is not: masked scores, or
    an activation before a norm, would become a float32 residual.
    """
    found: dict[int, tuple[Request, ...]] = {}
    shared: dict[int, frozenset[int]] = {}

    def is_shared(v: Atom) -> bool:
        if isinstance(v, Literal) or not states[v].is_computed:
            return False
        is_low = is_16_bit(states[v].dtype)
        return is_low and (states[v].is_widened or consumers.of(v).fulls > 1)

    for i, (eqn, plan) in enumerate(zip(jaxpr.eqns, equations, strict=True)):
        if plan.inner:
            # These operands have other float32 consumers. If the body reads them in float32, too,
            # the plan of the call casts them before it.
            if some := frozenset(k for k, v in enumerate(eqn.invars) if is_shared(v)):
                shared[i] = some
            continue
        if eqn.primitive.name not in _FUSES or plan.reason.code is not ReasonCode.PROMOTE_LOW:
            continue
        reads = consumers.of(eqn.outvars[0])
        is_moved = reads.use is Use.FULL and reads.fulls > 0
        is_low = is_16_bit(plan.results[0].dtype)
        if i not in requested and is_moved and is_low and any(map(is_shared, eqn.invars)):
            found[i] = (Request(None, Use.FULL, 0, 0, reads.first),)
    return found, shared
