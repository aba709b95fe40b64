"""Which sources a jaxpr reads in 16 bits: their copies can be made outside of it, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..compat import Literal
from ..primitives.float8_scale import CopyKey, factor_keys, in_8_bits, moves_along
from ..primitives.reading import dot_dimensions
from ..primitives.traits import having
from .data import EquationPlan, Inside, Move, Multiply8, ValueState
from .float_dtypes import is_narrower

_WHOLE = having("whole")


def source_copies(
    jaxpr: Any,
    equations: Sequence[EquationPlan],
    states: Mapping[Any, ValueState],
    wide: np.dtype,
) -> tuple[tuple[int, CopyKey], ...]:
    """Returns pairs (input, dtype) of the sources that a jaxpr reads in a 16-bit dtype or 8 bits.

    A read of moved elements counts as a read of the input that they come from. In 8 bits it does
    where all elements are moved, as a part has a scale of its own, and where there is one scale.

    Args:
        jaxpr: The open jaxpr.
        equations: The plan of each equation.
        states: What is known of each input.
        wide: The wide dtype of the policy.
    """
    # Literals and known values are cast at trace time: there is nothing to hand in.
    roots = {v: i for i, v in enumerate(jaxpr.invars) if states[v].keeps_gradient}
    inputs, whole = frozenset(roots), set(roots)

    copies: dict[tuple[int, CopyKey], None] = {}
    for eqn, plan in zip(jaxpr.eqns, equations, strict=True):
        _follow(eqn, plan, roots)
        if isinstance(plan.action, Move):
            # Along which dimensions of the moved array a stack would have its scales, nobody asks.
            first = eqn.invars[0]
            # A literal that is an array has no hash.
            is_whole = not isinstance(first, Literal) and first in whole
            if is_whole and not plan.given[0].scales and eqn.primitive.name in _WHOLE:
                whole.update(eqn.outvars)
            continue
        # Most equations are read as they are.
        if not any(plan.operands) and not plan.source_copies:
            continue
        operands: list[CopyKey | None] = list(plan.operands)
        in_8 = [(eqn.invars[i], d) for i, d in plan.source_copies if in_8_bits(d)]
        if isinstance(plan.action, Multiply8):
            operands[plan.action.weight] = None
            in_8 += _factor_of(eqn, plan.action)
        copies.update(
            ((roots[v], d), None) for v, d in in_8 if v in (whole if moves_along(d) else inputs)
        )
        reads = [(_root(v, roots), d) for v, d in zip(eqn.invars, operands, strict=True)]
        reads = [(r, d) for r, d in reads if isinstance(d, np.dtype) and is_narrower(d, wide)]
        reads += [
            (_root(eqn.invars[i], roots), d) for i, d in plan.source_copies if not in_8_bits(d)
        ]
        copies.update(((root, d), None) for root, d in reads if root is not None)
    return tuple(copies)


def _factor_of(eqn: Any, action: Multiply8) -> list[tuple[Any, CopyKey]]:
    """Returns the weight of a product in 8 bits, and what it is read by: values and scale."""
    weight = eqn.invars[action.weight]
    recipe, rank = action.recipe, weight.aval.ndim
    keys = factor_keys(recipe, dot_dimensions(eqn), rank, action.weight)
    return [(weight, key) for key in keys]


def _follow(eqn: Any, plan: EquationPlan, roots: dict[Any, int]) -> None:
    """Adds what an equation moves of an input to the values that come from one.

    Args:
        eqn: The equation.
        plan: Its plan.
        roots: From a variable to the input whose elements it holds.
    """
    found: list[int | None] = []
    if isinstance(plan.action, Move):
        # The first operand that comes from an input: the others are indices or padding values.
        first = next((r for v in eqn.invars if (r := _root(v, roots)) is not None), None)
        found = [first] * len(eqn.outvars)
    elif isinstance(plan.action, Inside) and plan.action.inlined:
        (inner,) = plan.inner
        pairs = zip(inner.jaxpr.invars, eqn.invars, strict=True)
        within = {v: root for v, given in pairs if (root := _root(given, roots)) is not None}
        for inner_eqn, inner_plan in zip(inner.jaxpr.eqns, inner.equations, strict=True):
            _follow(inner_eqn, inner_plan, within)
        found = [_root(v, within) for v in inner.jaxpr.outvars]
    roots.update((v, root) for v, root in zip(eqn.outvars, found, strict=False) if root is not None)


def _root(atom: Any, roots: Mapping[Any, int]) -> int | None:
    return None if isinstance(atom, Literal) else roots.get(atom)
