"""Who decides the dtype of an operation that promotes, and which literals object to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import Policy
from ..primitives.reading import lengths_kept
from ..primitives.traits import having
from .data import Reason, ReasonCode, Source, ValueState
from .symbolic_sizes import at_least, element_count
from .value_facts import representable

_REPLICATES = having("replicates")


def voters(
    policy: Policy, eqn: Any, given: Sequence[ValueState], floats: Sequence[int]
) -> list[int]:
    """Returns the operands whose dtypes decide the dtype of an operation that promotes.

    A computed value votes. A parameter, a constant and a literal do not: cast down they cost a
    relative 2**-9 of their own value, and one float32 bias would otherwise raise all that follows.
    Data of the program votes as PyTorch's float32 tensors do, but only at the full size of the
    result: a row that is replicated (a bias, a norm's scale) would raise a whole activation.

    Args:
        policy: Says whether data votes at all.
        eqn: The equation.
        given: What is known of each operand.
        floats: The positions of the float operands.

    Returns:
        The positions of the operands that vote.
    """
    # Where nothing is broadcast (select_n, concatenate) all operands have the size of the result.
    as_large_as: list[Any] = []
    if eqn.primitive.name in _REPLICATES:
        as_large_as = [*eqn.outvars, *(eqn.invars[i] for i in floats)]

    def votes(i: int) -> bool:
        if given[i].source is None:
            return True
        if given[i].source is not Source.DATA or policy.data_abstains:
            return False
        own = element_count(eqn.invars[i])
        return all(at_least(own, element_count(v)) for v in as_large_as)

    return [i for i in floats if votes(i)]


def literal_guard(
    given: Sequence[ValueState], floats: Sequence[int], compute_dtype: np.dtype
) -> Reason | None:
    """Returns which literal or constant means something else in the compute dtype, None if none.

    Args:
        given: What is known of each operand.
        floats: The positions of the float operands.
        compute_dtype: float16 or bfloat16.
    """
    # Checked for each operand, also those that do not vote: -3.4e38 of a mask is -inf in float16
    # and in bfloat16, and a row that is masked throughout becomes NaN in the softmax after it.
    for i in floats:
        value, const_range = given[i].known_value, given[i].const_range
        if value is not None and not representable(value, compute_dtype):
            cause = f"{value:g} has no {compute_dtype.name} value"
            return Reason(ReasonCode.LITERAL, cause, (i,))
        if const_range is not None and compute_dtype in const_range.exceeds():
            cause = f"operand {i} exceeds the range of {compute_dtype.name}"
            return Reason(ReasonCode.LITERAL, cause, (i,))
    return None


def is_replicated(eqn: Any, i: int) -> bool:
    """Returns whether an equation that replicates reads elements of operand ``i`` repeatedly."""
    shape, result = eqn.invars[i].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "broadcast_in_dim":
        kept = lengths_kept(eqn)
        return any(length != kept.get(k, 1) for k, length in enumerate(result))
    return shape != result
