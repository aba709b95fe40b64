"""Which sources a jaxpr reads in 16 bits: their copies can be made outside of it, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...policies import E4M3, FLOAT32
from ..compat import Literal
from ..primitives.float8_scale import CopyKey, ScaleOf
from ..primitives.traits import having
from .data import EquationPlan, Move, Multiply8, ValueState

_WHOLE = having("whole")


def source_copies(
    jaxpr: Any, equations: Sequence[EquationPlan], states: Mapping[Any, ValueState]
) -> tuple[tuple[int, CopyKey], ...]:
    """Returns pairs (input, dtype) of the sources that a jaxpr reads in a 16-bit dtype or 8 bits.

    A read of moved elements counts as a read of the input that they come from. In 8 bits it does
    where all elements are moved: a part has a scale of its own.

    Args:
        jaxpr: The open jaxpr.
        equations: The plan of each equation.
        states: What is known of each input.
    """
    # Literals and known values are cast at trace time: there is nothing to hand in.
    roots = {v: i for i, v in enumerate(jaxpr.invars) if states[v].keeps_gradient}
    whole = set(roots)

    def root_of(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else roots.get(atom)

    copies: dict[tuple[int, CopyKey], None] = {}
    for eqn, plan in zip(jaxpr.eqns, equations, strict=True):
        # The first operand that comes from an input: the others are indices or padding values.
        if isinstance(plan.action, Move):
            root = next((r for v in eqn.invars if (r := root_of(v)) is not None), None)
            if root is not None:
                roots.update((v, root) for v in eqn.outvars)
                if eqn.primitive.name in _WHOLE and eqn.invars[0] in whole:
                    whole.update(eqn.outvars)
            continue
        # Most equations are read as they are.
        if not any(plan.operands) and not plan.source_copies:
            continue
        operands: list[CopyKey | None] = list(plan.operands)
        if isinstance(plan.action, Multiply8):
            weight = eqn.invars[plan.action.weight]
            operands[plan.action.weight] = None
            if weight in whole:
                copies.update(dict.fromkeys((roots[weight], k) for k in (E4M3, ScaleOf(E4M3))))
        reads = [(root_of(v), d) for v, d in zip(eqn.invars, operands, strict=True)]
        reads = [(root, d) for root, d in reads if d is not None and d != FLOAT32]
        reads += [(root_of(eqn.invars[i]), d) for i, d in plan.source_copies]
        copies.update(((root, d), None) for root, d in reads if root is not None)
    return tuple(copies)
