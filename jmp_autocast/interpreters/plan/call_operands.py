"""Casts of operands before a call or a loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...policies import FLOAT32
from ..compat import Atom, Literal, variables_in
from ..primitives.structure import bodies, has_rule, is_plain_call, isolates
from .data import Context, Move, Plan, Source, Use, ValueState
from .float_dtypes import is_16_bit


def read_low(
    inner: Plan, ctx: Context, sources: Sequence[Source | None] = (None,)
) -> list[np.dtype | None]:
    """Returns the casts of float32 operands, of given kinds, with 16-bit reads only in the body.

    Before a call, a cast is shared with other consumers, and the residuals of the call are half as
    large. Before a loop, it is done once.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        ctx: The equation.
        sources: The kinds of the operands that may be cast; None is a computed value.
    """

    # A known value is cast at trace time, and each use of a source is a view.
    def is_cast(state: ValueState, use: Use) -> bool:
        may_be = state.source in sources and state.known_value is None
        return may_be and use is Use.LOW and state.dtype == FLOAT32

    uses: Sequence[Use] = demands_behind_moves(inner) if isolates(ctx.eqn) else inner.uses
    casts = list(map(is_cast, ctx.given, uses))
    if any(casts) and not isolates(ctx.eqn):
        # A comparison requests no float32; if it reads float32 inline, it does so in a call.
        reads = demands_behind_moves(inner)
        casts = [cast and not read & Use.FULL for cast, read in zip(casts, reads, strict=True)]
    return [ctx.region.compute_dtype if cast else None for cast in casts]


def demands_behind_moves(plan: Plan) -> list[Use]:
    """Returns the dtypes in which equations consume each input, past movements of a source.

    `Plan.demands` calls that a float32 read, because a float32 result is planned for it.

    Args:
        plan: The plan of the jaxpr.
    """
    found = [Use.NONE] * len(plan.inputs)
    inputs: dict[Atom, int] = {v: i for i, v in enumerate(plan.jaxpr.invars)}

    def add(atoms: Sequence[Atom], uses: Sequence[Use]) -> None:
        for v, use in zip(atoms, uses, strict=True):
            if not isinstance(v, Literal) and v in inputs:
                found[inputs[v]] |= use

    for eqn, equation in zip(plan.jaxpr.eqns, plan.equations, strict=True):
        moved = [inputs[v] for v in variables_in(eqn.invars) if v in inputs]
        if isinstance(equation.action, Move) and moved:
            inputs.update(dict.fromkeys(eqn.outvars, moved[0]))
            continue
        # For a call its operand casts count, and where it has none the uses in its bodies.
        dtypes = equation.operands if equation.inner else equation.reads
        reads = [Use.of(dtype) for dtype in dtypes]
        for body, inner in zip(bodies(eqn), equation.inner, strict=True) if equation.inner else ():
            for i, use in zip(body.operands, demands_behind_moves(inner), strict=True):
                reads[i] |= use
        add(eqn.invars, reads)
    add(plan.jaxpr.outvars, [Use.of(state.dtype) for state in plan.outputs])
    return found


def read_full(inner: Plan, ctx: Context) -> list[np.dtype | None]:
    """Returns the casts of 16-bit operands with float32 reads only, in a call and elsewhere.

    Before the call, the cast is shared with the other consumers, and their cotangents are added in
    float32: a batch norm subtracts the mean of the operand of `jnp.var`, and the two cotangents
    nearly cancel. Rounded before the sum, the gradient of the previous layer was 2.5 % off in
    bfloat16; it is 0.17 %.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        ctx: The equation.
    """
    # Residuals of a checkpoint stay 16 bits wide, and so do transfers to devices or the host.
    if not (is_plain_call(ctx.eqn) or has_rule(ctx.eqn)):
        return [None] * len(ctx.given)

    def is_cast(state: ValueState, use: Use, fulls: int) -> bool:
        may_be = state.is_computed and state.known_value is None and state.is_widened
        is_read = use is Use.FULL and fulls > 0  # a mere output has no reads
        return may_be and is_read and is_16_bit(state.dtype)

    found = zip(ctx.given, inner.uses, inner.fulls, strict=True)
    return [FLOAT32 if is_cast(*one) else None for one in found]


def cast_states(
    given: Sequence[ValueState],
    operands: Sequence[np.dtype | None],
) -> list[ValueState]:
    """Returns the states of operands after their casts.

    Args:
        given: Their states before.
        operands: The dtype that each is cast to, None for none.
    """

    def after(state: ValueState, dtype: np.dtype | None) -> ValueState:
        if dtype is None:
            return state
        was_rounded = dtype == FLOAT32 and is_16_bit(state.dtype)
        # Rounded coordinates keep their bound.
        bound = state.integer_bound
        return ValueState(dtype, integer_bound=bound, was_rounded=was_rounded, marks=state.marks)

    return list(map(after, given, operands))
