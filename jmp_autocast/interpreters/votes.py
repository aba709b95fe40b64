"""Who decides the dtype of an operation that promotes, and which literals object to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policies import Policy
from .guards import representable
from .plan import Code, Leaf, Reason, ValueState
from .sizes import at_least, size

# Operands of size 1 along a dimension are broadcast inside these; their transpose sums.
REPLICATING = frozenset(
    "add add_any sub mul div rem max min atan2 clamp pow broadcast_in_dim".split()
)


def voters(
    policy: Policy, eqn: Any, states: Sequence[ValueState], floats: Sequence[int]
) -> list[int]:
    """Computed values vote, and data leaves that are not replicated to the result's size."""
    beside: list[Any] = []
    if eqn.primitive.name in REPLICATING:
        beside = [*eqn.outvars, *(eqn.invars[i] for i in floats)]

    def votes(i: int) -> bool:
        if states[i].leaf is None:
            return True
        data = states[i].leaf is Leaf.DATA and not policy.data_abstains
        return data and all(at_least(size(eqn.invars[i]), size(v)) for v in beside)

    return [i for i in floats if votes(i)]


def literal_guard(
    states: Sequence[ValueState], floats: Sequence[int], low: np.dtype
) -> Reason | None:
    """Says which literal or constant means something else in ``low``, None if none does."""
    for i in floats:
        known, extent = states[i].known, states[i].extent
        if known is not None and not representable(known, low):
            return Reason(Code.LITERAL, f"{known:g} has no {low.name} value", (i,))
        if extent is not None and low in extent.exceeds():
            return Reason(Code.LITERAL, f"operand {i} exceeds the range of {low.name}", (i,))
    return None


def is_replicated(eqn: Any, i: int) -> bool:
    """Returns whether a `REPLICATING` equation reads elements of an operand more than once."""
    shape, result = eqn.invars[i].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "broadcast_in_dim":
        once = dict(zip(eqn.params["broadcast_dimensions"], shape, strict=True))
        return any(length != once.get(k, 1) for k, length in enumerate(result))
    return shape != result
