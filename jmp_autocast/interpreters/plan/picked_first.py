"""Picks elements from the operands of a float32 equation, instead of from its result.

If a gather picks elements of a float32 value, the elementwise equations that compute this value are
repeated for the picked elements alone. The result has the derivative of a pick from the float32
value, so that its cotangent is added in float32 to those of the other consumers. In a softmax, the
gradient of the label's logit is ``p - 1``: as a sum of two 16-bit terms, it is 0 for p = 0.999 in
bfloat16.

Elements are picked from the float32 copies that other consumers read. XLA may leave out a rounding
to 16 bits before a cast to float32: for a pick from the 16-bit value itself, which it does not
leave out, the loss of a label of probability 1 was -0.05 on a CPU. A TPU stores such a copy only
for a gather along several dimensions, such as ``logp[rows, labels]``.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

from ...policies import FLOAT32
from ..compat import JaxprEqn, Literal, aval_of, bound, literal_value, mark_frames
from ..compat.rebuilding import with_equations
from ..primitives.evaluate import evaluate
from ..primitives.picking import fills_with_number, is_elementwise, picked_by_rows, picks
from ..primitives.source_view import detached, source_view
from .data import Bind, Emit, EquationPlan, Keep, Plan, ReasonCode

mark_frames(__file__)


def picked_first(plan: Plan) -> Plan:
    """Returns a plan in which picked elements of float32 values are computed from picked operands.

    Args:
        plan: The plan of a jaxpr; returned as it is if nothing is picked.
    """
    eqns, equations = list(plan.jaxpr.eqns), list(plan.equations)
    positions = [k for k, eqn in enumerate(eqns) if picks(eqn) and _is_replaced(eqn, equations[k])]
    for k in positions:
        eqns[k], equations[k] = _of_operands(plan, k)
    jaxpr = with_equations(plan.jaxpr, eqns)
    return dataclasses.replace(plan, jaxpr=jaxpr, equations=tuple(equations)) if positions else plan


def _is_replaced(eqn: JaxprEqn, of: EquationPlan) -> bool:
    """Whether an equation picks from a float32 value in a scope that lowers equations."""
    # With explicit mesh axes, a pick stays as it is: the program, and not XLA, sets the sharding
    # of each result.
    is_sharded = any(any(aval_of(v).sharding.spec) for v in (eqn.invars[0], eqn.outvars[0]))
    is_lowered = of.reason.code is not ReasonCode.SCOPE and _is_float32(eqn, of)
    # An index out of range picks NaN from each operand, and the equations pass it on; they would
    # change a number.
    return is_lowered and not is_sharded and not fills_with_number(eqn)


def _is_float32(eqn: JaxprEqn, of: EquationPlan) -> bool:
    """Whether an equation is computed in float32 as it is written."""
    is_bound = isinstance(of.action, Keep | Bind) and not of.casts
    return is_bound and of.results[0].dtype == FLOAT32 == aval_of(eqn.outvars[0]).dtype


def _of_operands(plan: Plan, k: int) -> tuple[Any, EquationPlan]:
    """Returns an equation that computes picked elements from operands, and its plan."""
    jaxpr: Any = plan.jaxpr
    pick, of = jaxpr.eqns[k], plan.equations[k]
    value, shape = pick.invars[0], aval_of(pick.invars[0]).shape
    # Elements are picked from these values, and the equations are computed for these elements.
    given, repeated = {value: of.given[0]}, []
    for i in reversed(range(k)):
        eqn, other = jaxpr.eqns[i], plan.equations[i]
        if not is_elementwise(eqn) or (v := eqn.outvars[0]) not in given:
            continue
        are_floats = all(state.dtype is not None for state in other.given)
        if are_floats and aval_of(v).shape == shape and _is_float32(eqn, other):
            repeated.insert(0, eqn)
            del given[v]
            operands = zip(eqn.invars, other.given, strict=True)
            given.update((x, state) for x, state in operands if not isinstance(x, Literal))
    inner = jaxpr.replace(constvars=[], invars=[*given], eqns=repeated, outvars=[value])

    def repeat(_: int, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return bound(eqn, operands)

    def picked(array: Any, indices: Any, *arrays: Any) -> Any:
        constants = map(detached, arrays)
        elements = [picked_by_rows(pick, x, indices) if x.ndim else x for x in constants]
        # The repeated equations are in the scopes of the pick.
        (element,) = evaluate(inner, (), elements, literal_value, repeat, lambda _: nullcontext())
        return source_view(picked_by_rows(pick, array, indices), element)

    states, dtypes = (*of.given, *given.values()), (*of.operands, *[FLOAT32] * len(given))
    of = dataclasses.replace(of, action=Emit(picked, "picks"), given=states, operands=dtypes)
    return pick.replace(invars=[*pick.invars, *given]), of
