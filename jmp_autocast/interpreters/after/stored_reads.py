"""Finds every dtype in which a planned program reads each of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import JaxprEqn
from ..plan.data import Bind, EquationPlan, Keep, Move, Plan
from ..primitives.reading import cast_dtype
from ..primitives.structure import bodies, isolates
from ..primitives.traits import having
from .walk import Root, entering, follow, leaving


@dataclasses.dataclass(frozen=True)
class Copied:
    """A read of a source through an encoded copy, such as 8-bit values.

    Args:
        slices: The number of leading dimensions along which loops slice the source. Each slice has
            an encoding of its own. None if the equation reads a part or a shard of the source,
            which is not encoded as the whole source is.
    """

    slices: int | None = 0


Read: TypeAlias = np.dtype | Copied
"""How an equation reads an operand: in a dtype, or through an encoded copy."""


Roots = frozenset[Root]

_NONE: Roots = frozenset()
_ELEMENTS = (having("affine") & having("rounds")) - {"convert_element_type"}
_WHOLE = having("whole")


def read_dtypes(plan: Plan) -> list[set[Read]]:
    """Returns the dtypes in which a program reads each float32 input, also after moves.

    `Plan.uses` leaves out reads that accept both 16 bits and float32, such as comparisons. Here
    each read counts: an input with bfloat16 reads only may be rounded beforehand.

    Args:
        plan: The plan of the program.

    Returns:
        For each input, the dtypes, and `Copied` for an encoding; empty for an unused input.
    """
    reads: list[set[Read]] = [set() for _ in plan.inputs]
    for roots in _follow(plan, [frozenset((Root(i),)) for i in range(len(reads))], reads):
        _read(roots, FLOAT32, reads)
    return reads


def _follow(plan: Plan, inputs: Sequence[Roots], reads: list[set[Read]]) -> list[Roots]:
    """Records the reads of program inputs in a jaxpr; returns the inputs that its outputs hold."""

    def step(i: int, eqn: JaxprEqn, given: list[Roots]) -> Sequence[Roots]:
        equation, count = plan.equations[i], len(eqn.outvars)
        results = [_NONE] * count
        if not any(given):
            return results
        if _hands_on(eqn, equation, given):
            is_all = isinstance(equation.action, Move) and eqn.primitive.name in _WHOLE
            results = [_moved(given, is_all)] * count
        elif equation.inner:
            results = _inside(eqn, equation, given, reads)
        else:
            for k, roots in enumerate(given):
                _read(roots, _way(eqn, equation, k), reads)
        return _cast(results, equation.casts or [None] * count, reads)

    return _cast(follow(plan.jaxpr, inputs, _NONE, step), plan.output_dtypes, reads)


def _moved(given: Sequence[Roots], is_all: bool) -> Roots:
    return frozenset(root.moved(is_all) for roots in given for root in roots)


def _read(roots: Roots, dtype: np.dtype | None, reads: list[set[Read]]) -> None:
    """Records one read of a value, in ``dtype`` or, if it is None, through an encoded copy."""
    for root in roots:
        reads[root.input].add(Copied(root.slices) if dtype is None else dtype)


def _cast(
    values: Sequence[Roots], casts: Sequence[np.dtype | None], reads: list[set[Read]]
) -> list[Roots]:
    """Records casts of values as reads, and returns the inputs that the values hold after them."""
    for roots, dtype in zip(values, casts, strict=True):
        if dtype is not None:
            _read(roots, dtype, reads)
    return [_NONE if dtype else roots for roots, dtype in zip(values, casts, strict=True)]


def _hands_on(eqn: JaxprEqn, plan: EquationPlan, given: Sequence[Roots]) -> bool:
    """Whether each element of the results is an element of an operand that is not cast.

    Rounding commutes with such an equation, so that the equation counts as no read. A sort commutes
    as well, but counts as a read, because it reorders other operands along with its keys.
    """
    if isinstance(plan.action, Move):
        return True
    as_it_is = all(d is None for d, roots in zip(plan.operands, given, strict=True) if roots)
    return as_it_is and eqn.primitive.name in _ELEMENTS and isinstance(plan.action, Bind | Keep)


def _way(eqn: JaxprEqn, plan: EquationPlan, k: int) -> np.dtype | None:
    """Returns the dtype in which an equation reads an operand, None for an encoding."""
    if plan.copies:
        # An operand that is not read through a copy counts as read in float32. So does an
        # activation, even if the equation encodes it.
        return None if any(k == i for i, _ in plan.copies) else FLOAT32
    # An operand that the plan does not cast is read in float32, unless the program rounds it.
    target = cast_dtype(eqn)
    return plan.operands[k] or (target if target in COMPUTE_DTYPES else FLOAT32)


def _inside(
    eqn: JaxprEqn, plan: EquationPlan, given: list[Roots], reads: list[set[Read]]
) -> list[Roots]:
    """Records the reads of inputs in an equation's bodies; returns the inputs its results hold."""
    given = _cast(given, plan.operands, reads)
    results = [_NONE] * len(eqn.outvars)
    for body, inner in zip(bodies(eqn), plan.inner, strict=True):
        for i in body.carried:
            # The initial value of a carry counts as read in float32, because the carry is another
            # value in the next iteration.
            _read(given[body.operands[i]], FLOAT32, reads)
        inside = entering(body, given, _NONE)
        for i in range(body.takes_copies_at, len(inside)):
            inside[i] = frozenset(root.sliced() for root in inside[i])
        if isolates(eqn):  # each shard has an encoding of its own
            inside = [_moved([roots], False) for roots in inside]
        outputs = _follow(inner, inside, reads)
        for k, roots in enumerate(leaving(body, outputs, _NONE, len(results))):
            results[k] |= _moved([roots], False)
    return results
