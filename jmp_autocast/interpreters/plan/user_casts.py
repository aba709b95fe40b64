"""The planning rule of the program's own casts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ...policies import FLOAT32
from ...scopes import CAST, mark
from ..compat import Atom, aval_of
from ..primitives.reading import cast_dtype
from .data import KEEP, Cast, Context, EquationPlan, Move, Source, Use, ValueState
from .reasons import Reason, ReasonCode
from .structural import Plans, plans
from .value_facts import number_state

_OURS = mark(CAST)


@plans("convert_element_type")
def _convert_element_type(planner: Plans, ctx: Context) -> EquationPlan:
    """A cast of the program is done as written.

    A cast bool or small integer is a constant; other integers become data with their bound.
    """
    given, eqn = ctx.given, ctx.eqn
    (state,), (var,) = given, eqn.invars
    is_back = aval_of(eqn.outvars[0]).dtype == FLOAT32
    if is_back and ctx.region.names and ctx.region.names[-1] == _OURS:
        # This cast follows a kernel, whose result keeps its dtype.
        no_cast = Reason(ReasonCode.STRUCTURAL, "no cast")
        return EquationPlan(Cast(), given, (None,), (state,), no_cast)
    source, target = ctx.declared(var), ctx.declared(eqn.outvars[0])
    cast = Reason(ReasonCode.USER_CAST, f"{aval_of(var).dtype} to {cast_dtype(eqn)}")
    if source is None and target is None:
        known = state.known_value
        bound = state.integer_bound if known is None else abs(known)
        result = ValueState(None, known_value=known, integer_bound=bound)
        return EquationPlan(KEEP, given, (None,), (result,), cast)
    if source is None:
        assert target is not None
        action = Move() if _is_exact(var) else KEEP
        result = number_state(aval_of(var).dtype, target, state)
        return EquationPlan(action, given, (None,), (result,), cast)
    # The value may run in another dtype than the one that the cast was written for.
    as_declared = state.dtype == source
    action = KEEP if as_declared else Cast()
    if target is None:
        # float64 and complex numbers have the digits of float32: a cast to them requests float32.
        made = aval_of(eqn.outvars[0]).dtype
        is_wider = jnp.issubdtype(made, jnp.inexact) and made.itemsize > FLOAT32.itemsize
        uses = (Use.FULL,) if is_wider else ()
        return EquationPlan(action, given, (None,), (ValueState(None),), cast, uses=uses)
    if source == target:
        # Only the weak type changes: the value keeps its dtype.
        if state.source is not None:
            reason = Reason(ReasonCode.SOURCE, "no cast", (0,))
            return EquationPlan(Move(as_declared), given, (None,), (state,), reason)
        reason = Reason(ReasonCode.STRUCTURAL, "no cast", (0,))
        return EquationPlan(action, given, (None,), (state,), reason)
    if state.known_value is not None:
        result = ValueState(target, Source.LITERAL, state.known_value)
    else:
        bound = state.integer_bound
        result = ValueState(target, integer_bound=bound, narrowed_by_user=target != FLOAT32)
    # The cast requests its target dtype: the producer of a cast to float32 is raised rather than
    # rounded and widened again.
    use = Use.of(target)
    if use is Use.LOW and target != ctx.region.compute_dtype:
        # The compute dtype lacks digits or range of `target`: do not round the producer.
        use |= Use.FULL
    lowers = ctx.region.compute_dtype is not None and state.dtype != target
    operand = target if lowers else None
    return EquationPlan(action, given, (operand,), (result,), cast, uses=(use,))


def _is_exact(var: Atom) -> bool:
    dtype = aval_of(var).dtype
    return isinstance(dtype, np.dtype) and dtype.kind in "biu" and dtype.itemsize == 1
