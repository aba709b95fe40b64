"""Picks elements from the operands of a float32 equation, instead of from its result.

If a gather picks elements of a float32 value, the equations that compute this value are repeated
for the picked elements alone, in the dtypes of the plan. They read elements that are picked from
the 16-bit operand. The result has the derivative of a pick from the float32 value, so that its
cotangent is added in float32 to those of the other consumers. In a softmax, the gradient of the
label's logit is ``p - 1``: as a sum of two 16-bit terms, it is 0 for p = 0.999 in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...policies import FLOAT32
from ..compat import JaxprEqn, Literal, aval_of, mark_frames
from ..compat.rebuilding import equation_like, variable, with_equations
from ..primitives.picking import (
    is_elementwise,
    passes_picks,
    picked_by_rows,
    picked_elements,
    picks,
    with_all_dimensions,
)
from ..primitives.source_view import detached, source_view
from .avals import is_16_bit
from .data import BIND, Bind, Cast, Emit, EquationPlan, Keep, Move, Plan, ReasonCode, ValueState

mark_frames(__file__)

_Planned: TypeAlias = tuple[Any, EquationPlan]


def picked_first(plan: Plan) -> Plan:
    """Returns a plan in which picked elements of float32 values are computed from picked operands.

    Args:
        plan: The plan of a jaxpr; returned as it is if nothing is picked.
    """
    positions = {k for k, eqn in enumerate(plan.jaxpr.eqns) if picks(eqn) and _is_lowered(plan, k)}
    return _Picking(plan, positions).planned() if positions else plan


def _is_lowered(plan: Plan, k: int) -> bool:
    """Whether an equation picks from a float32 value in a scope that lowers equations."""
    eqn, of = plan.jaxpr.eqns[k], plan.equations[k]
    is_bound = isinstance(of.action, Keep | Bind) and of.reason.code is not ReasonCode.SCOPE
    # With explicit mesh axes, a pick stays as it is: the program, and not XLA, sets the sharding
    # of each result.
    is_sharded = any(any(aval_of(v).sharding.spec) for v in (eqn.invars[0], eqn.outvars[0]))
    return is_bound and not is_sharded and _is_float32(of)


def _is_float32(plan: EquationPlan) -> bool:
    """Whether an equation is computed in float32 element by element."""
    if not isinstance(plan.action, Keep | Bind | Cast | Move) or plan.casts:
        return False
    replicates = isinstance(plan.action, Bind) and plan.action.replicates
    return not replicates and plan.results[0].dtype == FLOAT32


class _Picking:
    """The equations of a plan, including new ones that compute picked elements.

    Args:
        plan: The plan.
        positions: The positions of the equations that pick elements.
    """

    def __init__(self, plan: Plan, positions: Collection[int]) -> None:
        self._plan = plan
        self._states = dict(zip(plan.jaxpr.invars, plan.inputs, strict=True))
        self._states.update(zip(plan.jaxpr.constvars, plan.consts, strict=True))
        self._makers: dict[Any, _Planned] = {}
        self._made: list[_Planned] = []
        # `_narrow` has the 16-bit values that elements are picked from, and the picked elements;
        # `_rounded` maps each to its float32 copy.
        self._narrow: set[Any] = set()
        self._rounded: dict[Any, Any] = {}
        for k, one in enumerate(zip(plan.jaxpr.eqns, plan.equations, strict=True)):
            eqn, of = one
            for v, state in zip(eqn.outvars, of.results, strict=True):
                self._states[v], self._makers[v] = state, one
            if k in positions:
                self._pick(eqn, of)
            else:
                self._made.append(one)

    def planned(self) -> Plan:
        """Returns the plan with the new equations."""
        made, self._made = self._made, []
        read = {v for eqn, of in made if any(of.operands) for v in _read_in(FLOAT32, eqn, of)}
        self._narrow &= read
        inputs = (*self._plan.jaxpr.constvars, *self._plan.jaxpr.invars)
        self._round(inputs, *made[0])
        for eqn, of in made:
            self._made.append(self._of_rounded(eqn, of) if any(of.operands) else (eqn, of))
            if not self._narrow.isdisjoint(eqn.outvars):
                self._round(eqn.outvars, eqn, of)
        eqns, equations = zip(*self._made, strict=True)
        jaxpr = with_equations(self._plan.jaxpr, eqns)
        return dataclasses.replace(self._plan, jaxpr=jaxpr, equations=equations)

    # --- elements -------------------------------------------------------------------------------

    def _pick(self, eqn: JaxprEqn, of: EquationPlan) -> None:
        """Replaces an equation that picks by equations that compute the picked elements."""
        element = self._element(eqn, of, eqn.invars[0], {})

        def picked(array: Any, indices: Any, element: Any) -> Any:
            return source_view(picked_by_rows(eqn, array, indices), element)

        given, reads = (*of.given, self._states[element]), (*of.operands, FLOAT32)
        of = dataclasses.replace(of, action=Emit(picked, "picks"), given=given, operands=reads)
        self._made.append((eqn.replace(invars=[*eqn.invars, element]), of))

    def _element(self, pick: Any, of: EquationPlan, v: Any, found: dict[Any, Any]) -> Any:
        """Returns the variable or literal of the elements that are picked from a value."""
        if isinstance(v, Literal) or v.aval.ndim == 0:
            return v
        if v not in found:
            eqn, plan = self._makers.get(v, (None, of))
            if eqn is not None and not (is_elementwise(eqn) and _is_float32(plan)):
                eqn = None
            if eqn is not None and passes_picks(eqn):
                operands = [self._element(pick, of, operand, found) for operand in eqn.invars]
                found[v] = self._variable(pick, v, plan.results[0])
                self._made.append((eqn.replace(invars=operands, outvars=[found[v]]), plan))
            elif eqn is not None and not isinstance(eqn.invars[0], Literal):
                found[v] = self._picked(pick, of, eqn.invars[0], plan.operands[0], eqn)
            else:
                found[v] = self._picked(pick, of, v)
        return found[v]

    def _picked(
        self,
        pick: Any,
        of: EquationPlan,
        v: Any,
        dtype: np.dtype | None = None,
        broadcast: Any = None,
    ) -> Any:
        """Returns the variable of elements picked from a value, or from its broadcast."""

        def picked(array: Any, indices: Any) -> Any:
            array = detached(array)
            if broadcast is None:
                return picked_by_rows(pick, array, indices)
            return picked_elements(pick, with_all_dimensions(broadcast, array), indices)

        given = self._states[v], of.given[1]
        state = ValueState(dtype or given[0].dtype)
        made = self._variable(pick, v, state)
        plan = EquationPlan(Emit(picked, "picks"), given, (dtype, None), (state,), of.reason)
        self._made.append((pick.replace(invars=[v, pick.invars[1]], outvars=[made]), plan))
        self._narrow |= {v, made} if is_16_bit(state.dtype) else set()
        return made

    def _variable(self, pick: Any, like: Any, state: ValueState) -> Any:
        aval = pick.outvars[0].aval.update(dtype=like.aval.dtype, weak_type=like.aval.weak_type)
        made = variable(aval)
        self._states[made] = state
        return made

    # --- roundings that XLA keeps ---------------------------------------------------------------

    def _round(self, variables: Sequence[Any], eqn: JaxprEqn, of: EquationPlan) -> None:
        """Adds the float32 copies of 16-bit values with picked elements.

        XLA drops a cast to 16 bits before a cast back to float32, but keeps a `reduce_precision`.
        Without the rounding, the float32 value would differ from its picked 16-bit elements: the
        loss of a label of probability 1 was -0.05 on a CPU.

        Args:
            variables: The values that the last equation has computed.
            eqn: An equation, whose scopes the copies get.
            of: Its plan.
        """
        for v in self._narrow.intersection(variables):
            state, full = self._states[v], ValueState(FLOAT32)
            # The derivative rounds cotangents in the same way, so the exponent has float32's bits:
            # with the five bits of float16, small cotangents became 0.
            bits = {
                "exponent_bits": jnp.finfo(FLOAT32).nexp,
                "mantissa_bits": jnp.finfo(state.dtype).nmant,
            }
            self._rounded[v] = variable(v.aval.update(dtype=FLOAT32))
            rounding = equation_like(eqn, lax.reduce_precision_p, [v], self._rounded[v], bits)
            plan = EquationPlan(BIND, (state,), (FLOAT32,), (full,), of.reason)
            self._made.append((rounding, plan))

    def _of_rounded(self, eqn: JaxprEqn, of: EquationPlan) -> _Planned:
        """Returns an equation and its plan, with the float32 copies of rounded operands."""
        read = _read_in(FLOAT32, eqn, of) if self._rounded else []
        if self._rounded.keys().isdisjoint(read):
            return eqn, of
        given, operands, invars = list(of.given), list(of.operands), list(eqn.invars)
        for i, v in enumerate(eqn.invars):
            if of.operands[i] == FLOAT32 and v in self._rounded:
                invars[i], operands[i] = self._rounded[v], None
                given[i] = ValueState(FLOAT32)
        of = dataclasses.replace(of, given=tuple(given), operands=tuple(operands))
        return eqn.replace(invars=invars), of


def _read_in(dtype: np.dtype, eqn: JaxprEqn, of: EquationPlan) -> list[Any]:
    """Returns the variables that an equation casts to ``dtype``."""
    pairs = zip(eqn.invars, of.operands, strict=True)
    return [v for v, requested in pairs if requested == dtype and not isinstance(v, Literal)]
