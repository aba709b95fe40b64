"""Where ``1 - f(x)`` is emitted as the function that it is: 16 bits would round ``f(x)`` to 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .data import Bind, Complement, EquationPlan, Keep
from .float_dtypes import is_narrower
from .reasons import Reason, ReasonCode

_OF_OPERANDS = (ReasonCode.PROMOTE_LOW, ReasonCode.PROMOTE_FULL, ReasonCode.FEEDER)


def complement(plan: EquationPlan, maker: Any, made: EquationPlan, wide: np.dtype) -> EquationPlan:
    """Returns the plan of ``1 - x`` where another equation of the jaxpr makes ``x``.

    Args:
        plan: The plan of the difference.
        maker: The equation that makes ``x``, of a primitive in `COMPLEMENTS`.
        made: Its plan.
        wide: The wide dtype of the policy.

    Returns:
        The plan that emits the complement, in the dtype of the difference. Where ``x`` has the
        digits of float32, or the program itself declares 16 bits, or a rule or a scope decides, the
        difference is what it was.
    """
    lowered = maker.outvars[0].aval.dtype == wide and is_narrower(made.results[0].dtype, wide)
    ordinary = isinstance(plan.action, Bind | Keep) and plan.reason.code in _OF_OPERANDS
    if not (lowered and ordinary and isinstance(made.action, Bind | Keep)):
        return plan
    function = maker.primitive.name
    dtype = plan.results[0].dtype
    assert dtype is not None
    cause = f"{plan.reason.cause}; emitted as the complement of {function}"
    return dataclasses.replace(
        plan,
        action=Complement(function, dtype, wide),
        reason=Reason(plan.reason.code, cause, plan.reason.operands),
    )
