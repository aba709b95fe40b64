"""A float32 sum of activations that were 16 bits before is rounded, and that once.

A norm behind a convolution computes in float32 what has lost 2**-9 in the convolution. With
``dtype=`` by hand, and as a batch norm of PyTorch, it returns 16 bits, and so does the sum of a
residual network, which its readers and the backward pass keep. Here the sum is computed in float32
and rounded once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ...policies import Policy
from ..primitives.traits import having
from .basic_plans import rounded_once
from .data import EquationPlan, Inside
from .float_dtypes import is_in, is_narrower
from .marks import AllMarks, is_convolved, of
from .needs import NOTHING, Need, Needs
from .reasons import Reason, ReasonCode
from .votes import far_literal, literal_guard, voters

_SUMS = having("sums")
_SUM = Reason(ReasonCode.PROMOTE_LOW, "all summands were rounded before")
_HARM = Need.SNAP | Need.POLE | Need.NEAR_1


class RoundedStreams:
    """Marks what was rounded before, and rounds sums of it: one instance per trace.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._wide = policy.wide_dtype
        # Equations that look alike share a plan, and keep sharing one.
        self._made: dict[tuple[int, bool], tuple[EquationPlan, EquationPlan]] = {}

    def follow(
        self, needs: Needs, marks: AllMarks, eqn: Any, plan: EquationPlan, dtype: np.dtype
    ) -> EquationPlan:
        """Returns the plan of an equation, rounded if it is a stream, or marked as rounded before.

        A sum is a stream if a product reads it, directly or through cheap operations. One that only
        a loss or a mean reads keeps float32, and so does one that becomes an integer, or reaches a
        logarithm or a denominator.

        Args:
            needs: What each value of the jaxpr is needed for.
            marks: How each is made.
            eqn: The equation.
            plan: Its plan so far.
            dtype: The compute dtype where it stands.
        """
        if isinstance(plan.action, Inside) or not _was_rounded(eqn, plan, self._wide):
            return plan
        if not (self._policy.data_abstains or self._promotes_computed(eqn, plan, dtype)):
            return plan
        is_stream = _is_sum(eqn, plan) and _is_read_low(needs, eqn.outvars[0])
        if not self._policy.data_abstains:
            is_stream = is_stream and is_convolved(of(marks, eqn.invars))
        key = (id(plan), is_stream)
        if key not in self._made:
            made = rounded_once(plan, dtype, _SUM) if is_stream else _marked(plan)
            self._made[key] = (plan, made)
        return self._made[key][1]

    def _promotes_computed(self, eqn: Any, plan: EquationPlan, dtype: np.dtype) -> bool:
        """Whether computed operands alone make an equation float32, as in PyTorch.

        What PyTorch computes in float32 (an exponential), what a guard keeps there (``h + 10000``),
        and what a position or another source is added to, has digits of its own. Cotangents add up
        in float32. At level "compute" none of this counts, as with ``dtype=`` by hand.
        """
        if plan.reason.code is not ReasonCode.PROMOTE_FULL or eqn.primitive.name == "add_any":
            return False
        floats = [i for i, state in enumerate(plan.given) if state.dtype is not None]
        votes = voters(self._policy, dtype, eqn, plan.given, floats)
        if any(plan.given[i].source is not None for i in votes):
            return False
        name = eqn.primitive.name
        return not (
            literal_guard(plan.given, floats, dtype) or far_literal(name, plan.given, floats, dtype)
        )


def _is_read_low(needs: Needs, v: Any) -> bool:
    """Whether a value reaches a product, and nothing in which its rounding does harm."""
    need = needs.get(v, NOTHING)
    return bool(need & Need.PRODUCT) and not need & _HARM


def _was_rounded(eqn: Any, plan: EquationPlan, wide: np.dtype) -> bool:
    """Whether the float32 result is made element by element of values that were 16 bits before."""
    if len(plan.results) != 1 or not is_in(plan.results[0].dtype, wide):
        return False
    shape = eqn.outvars[0].aval.shape
    pairs = zip(eqn.invars, plan.given, strict=True)
    found = [
        s.was_rounded or is_narrower(s.dtype, wide)
        for v, s in pairs
        if s.is_computed and v.aval.shape == shape
    ]
    return bool(found) and all(found)


def _is_sum(eqn: Any, plan: EquationPlan) -> bool:
    """Whether an equation adds computed values of its own size, and nobody asked for float32."""
    if eqn.primitive.name not in _SUMS or plan.reason.code is not ReasonCode.PROMOTE_FULL:
        return False
    shape = eqn.outvars[0].aval.shape
    pairs = zip(eqn.invars, plan.given, strict=True)
    return all(s.is_computed and v.aval.shape == shape for v, s in pairs)


def _marked(plan: EquationPlan) -> EquationPlan:
    (state,) = plan.results
    return dataclasses.replace(plan, results=(dataclasses.replace(state, was_rounded=True),))
