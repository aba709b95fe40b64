"""Plans the casts of operands before a call or a loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...policies import FLOAT32
from ..compat import Atom, Literal, variables_in
from ..primitives.structure import bodies, has_rule, is_plain_call, isolates
from .avals import is_16_bit
from .data import Context, Move, Plan, Source, Use, ValueState


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
    # reads its 16-bit copy through a `source_view`.
    def is_cast(state: ValueState, use: Use) -> bool:
        may_be = state.source in sources and state.known_value is None
        return may_be and use is Use.LOW and state.dtype == FLOAT32

    uses: Sequence[Use] = uses_behind_moves(inner) if isolates(ctx.eqn) else inner.uses
    casts = list(map(is_cast, ctx.given, uses))
    if any(casts) and not isolates(ctx.eqn):
        # `inner.uses` leaves out comparisons, which accept either dtype. In an inlined call, a
        # comparison would read float32: an operand that a comparison reads is not cast.
        reads = uses_behind_moves(inner)
        casts = [cast and not read & Use.FULL for cast, read in zip(casts, reads, strict=True)]
    return [ctx.region.compute_dtype if cast else None for cast in casts]


def uses_behind_moves(plan: Plan) -> list[Use]:
    """Returns the uses of each input of a jaxpr, including the uses of its moved elements.

    `Plan.uses` counts a move of a source as a float32 read, because the moved source is float32.

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
        # The reads of a call are the casts of its operands, and the reads in its bodies.
        dtypes = equation.operands if equation.inner else equation.reads
        reads = [Use.of(dtype) for dtype in dtypes]
        for body, inner in zip(bodies(eqn), equation.inner, strict=True) if equation.inner else ():
            for i, use in zip(body.operands, uses_behind_moves(inner), strict=True):
                reads[i] |= use
        add(eqn.invars, reads)
    add(plan.jaxpr.outvars, [Use.of(state.dtype) for state in plan.outputs])
    return found


def read_full(inner: Plan, ctx: Context) -> list[np.dtype | None]:
    """Returns the casts of 16-bit operands that a call and another consumer read in float32.

    One cast before the call serves all these consumers, and their cotangents are added in float32.
    A batch norm subtracts the mean of the operand of `jnp.var`, and the two cotangents nearly
    cancel. If they are rounded before the sum, the gradient of the previous layer is 2.5 % off in
    bfloat16, and else 0.17 %.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        ctx: The equation.
    """
    # The operands of a checkpoint are residuals and stay in 16 bits, and so do values that are sent
    # to devices or the host.
    if not (is_plain_call(ctx.eqn) or has_rule(ctx.eqn)):
        return [None] * len(ctx.given)

    def is_cast(state: ValueState, use: Use, fulls: int) -> bool:
        may_be = state.is_computed and state.known_value is None and state.is_widened
        is_read = use is Use.FULL and fulls > 0  # 0 for an operand that is only returned
        return may_be and is_read and is_16_bit(state.dtype)

    found = zip(ctx.given, inner.uses, inner.fulls, strict=True)
    return [FLOAT32 if is_cast(*one) else None for one in found]


def cast_states(
    given: Sequence[ValueState],
    operands: Sequence[np.dtype | None],
) -> list[ValueState]:
    """Returns the states of operands after their casts.

    Args:
        given: The states before the casts.
        operands: The dtype that each operand is cast to, None for no cast.
    """

    def after(state: ValueState, dtype: np.dtype | None) -> ValueState:
        if dtype is None:
            return state
        was_rounded = dtype == FLOAT32 and is_16_bit(state.dtype)
        return ValueState(dtype, was_rounded=was_rounded, marks=state.marks)

    return list(map(after, given, operands))
