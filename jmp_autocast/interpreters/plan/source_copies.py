"""Which sources a jaxpr reads in 16 bits: their copies can be made outside of it, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...policies import FLOAT32
from ..compat import Literal
from .data import EquationPlan, Move, ValueState


def source_copies(
    jaxpr: Any, equations: Sequence[EquationPlan], states: Mapping[Any, ValueState]
) -> tuple[tuple[int, np.dtype], ...]:
    """Returns pairs (input, dtype) of the sources that a jaxpr reads in a 16-bit dtype.

    A read of moved elements counts as a read of the input that they come from.

    Args:
        jaxpr: The open jaxpr.
        equations: The plan of each equation.
        states: What is known of each input.
    """
    # Literals and known values are cast at trace time: there is nothing to hand in.
    roots = {v: i for i, v in enumerate(jaxpr.invars) if states[v].keeps_gradient}

    def root_of(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else roots.get(atom)

    copies: dict[tuple[int, np.dtype], None] = {}
    for eqn, plan in zip(jaxpr.eqns, equations, strict=True):
        # The first operand that comes from an input: the others are indices or padding values.
        if isinstance(plan.action, Move):
            root = next((r for v in eqn.invars if (r := root_of(v)) is not None), None)
            if root is not None:
                roots.update((v, root) for v in eqn.outvars)
            continue
        # Most equations are read as they are.
        if not any(plan.operands) and not plan.source_copies:
            continue
        reads = [(root_of(v), d) for v, d in zip(eqn.invars, plan.operands, strict=True)]
        reads = [(root, d) for root, d in reads if d is not None and d != FLOAT32]
        reads += [(root_of(eqn.invars[i]), d) for i, d in plan.source_copies]
        copies.update(((root, d), None) for root, d in reads if root is not None)
    return tuple(copies)
