"""Which computed values are read in 16 bits so often that their gradient needs float32."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..compat import Literal
from .data import EquationPlan, ValueState, Want
from .float_dtypes import is_narrower

# Added up in bfloat16, seven cotangents lose no more than 7 / 2 units of 2**-9; 513 lost a third of
# the gradient of a normalized weight.
_MOST = 7

# What autocast has made of an earlier reading: its gradient goes to the source, not to the copy.
_REWRITTEN = frozenset(("source_view", "accumulate"))


def with_wide_gradients(
    jaxpr: Any,
    equations: Sequence[EquationPlan],
    states: Mapping[Any, ValueState],
    wants: Sequence[Want],
    wide: np.dtype,
) -> list[EquationPlan]:
    """Returns plans in which values that are read often are read as sources are: through views.

    A normalized weight, or a merged one, is computed once and read in each step of an unrolled
    loop; so is an encoding, a product in 16 bits, by each step of a decoder. Each read is then a
    view of the one 16-bit array, whose cotangent is widened before it is added to the others. That
    costs no kept byte: a view holds nothing.

    Args:
        jaxpr: The open jaxpr.
        equations: The plan of each equation.
        states: What is known of each value.
        wants: What is asked of each output.
        wide: The wide dtype of the policy.
    """
    reads: Counter[Any] = Counter()
    widened: set[Any] = set()

    def read(v: Any, dtype: np.dtype | None) -> None:
        if isinstance(v, Literal):
            return
        if is_narrower(dtype or states[v].dtype, wide):
            reads[v] += 1
        elif is_narrower(states[v].dtype, wide):
            widened.add(v)

    for eqn, plan in zip(jaxpr.eqns, equations, strict=True):
        if plan.operands and eqn.primitive.name not in _REWRITTEN:
            for v, dtype in zip(eqn.invars, plan.operands, strict=True):
                read(v, dtype)
    for v, want in zip(jaxpr.outvars, wants, strict=True):
        read(v, want.dtype)
    # All that read a value in float32 share one cast, which has one cotangent.
    reads.update(widened)
    often = {v for v, count in reads.items() if count > _MOST and states[v].source is None}
    if not often:
        return list(equations)
    return [
        _marked(plan, [v in often for v in eqn.outvars])
        for eqn, plan in zip(jaxpr.eqns, equations, strict=True)
    ]


def _marked(plan: EquationPlan, often: Sequence[bool]) -> EquationPlan:
    if not any(often):
        return plan
    results = tuple(
        dataclasses.replace(state, read_often=True) if is_often else state
        for state, is_often in zip(plan.results, often, strict=True)
    )
    return dataclasses.replace(plan, results=results)
