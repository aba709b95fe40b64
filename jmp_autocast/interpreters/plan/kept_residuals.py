"""Where a value that is raised to float32 would be kept in float32 for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat import variables_in
from ..primitives.traits import having
from .data import EquationPlan, Source, ValueState
from .reasons import ReasonCode
from .symbolic_sizes import at_least, element_count

_SUMS = having("sums")


def is_gated_summand(eqn: Any, plan: EquationPlan) -> bool:
    """Returns whether an equation is a product of two activations in 16 bits.

    Where only sums, or the caller, read it (a gated input of an LSTM, a last silu), it is not
    raised: its backward pass reads both factors, and would keep both in float32.
    """
    return eqn.primitive.name == "mul" and plan.reason.code is ReasonCode.PROMOTE_LOW


def is_residual_sum(eqn: Any, states: Mapping[Any, ValueState]) -> bool:
    """Returns whether an equation adds values of its own size that no parameter is among."""
    if eqn.primitive.name not in _SUMS:
        return False
    # A bias is smaller than the sum, and a parameter of full size (a learned position) is no
    # stream.
    shape = eqn.outvars[0].aval.shape
    summands = [v for v in variables_in(eqn.invars) if v.aval.shape == shape]
    sources = [states[v].source for v in summands]
    return len(sources) > 1 and all(source in (None, Source.DATA) for source in sources)


def shrinks(eqn: Any) -> bool:
    """Returns whether an operand has more elements than the results together."""
    results = sum(map(element_count, eqn.outvars))
    return not all(at_least(results, element_count(v)) for v in variables_in(eqn.invars))
