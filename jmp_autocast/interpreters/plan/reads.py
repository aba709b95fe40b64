"""In which dtypes a planned program reads each of its inputs, to the last comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import Literal
from ..primitives.reading import cast_dtype
from ..primitives.structure import Body, bodies
from ..primitives.traits import having
from .data import Bind, EquationPlan, Keep, Move, Plan

Roots = frozenset[int]
Reads = tuple[list[set[np.dtype]], list[Roots]]

_NONE: Roots = frozenset()
_ELEMENTS = (having("affine") & having("rounds")) - {"convert_element_type"}


def read_dtypes(plan: Plan) -> list[set[np.dtype]]:
    """Returns the dtypes in which a program reads each float32 input, wherever it moves it.

    ``demands`` asks what would serve the readers, and a comparison does well in either dtype. This
    asks what happens: an input that is read in bfloat16 alone may be rounded to that before.

    Args:
        plan: The plan of the program.

    Returns:
        For each input, the dtypes; empty where nothing reads it.
    """
    reads, outputs = _reads(plan, {})
    for roots, cast in zip(outputs, plan.output_dtypes, strict=True):
        for root in roots:
            reads[root].add(cast or FLOAT32)
    return reads


def _reads(plan: Plan, known: dict[int, Reads]) -> Reads:
    """Returns how a jaxpr reads its inputs, and which of them each output is, moved or not."""
    if id(plan) in known:
        return known[id(plan)]
    jaxpr = plan.jaxpr
    reads: list[set[np.dtype]] = [set() for _ in jaxpr.invars]
    roots: dict[Any, Roots] = {v: frozenset((i,)) for i, v in enumerate(jaxpr.invars)}

    def roots_of(atom: Any) -> Roots:
        return _NONE if isinstance(atom, Literal) else roots.get(atom, _NONE)

    for eqn, equation in zip(jaxpr.eqns, plan.equations, strict=True):
        given = list(map(roots_of, eqn.invars))
        if not any(given):
            continue
        results = [_NONE] * len(eqn.outvars)
        if _hands_on(eqn, equation, given):
            results = [_NONE.union(*given)] * len(results)
        else:
            for k, dtypes in enumerate(_by_operand(eqn, equation, results, given, known)):
                for root in given[k]:
                    reads[root] |= dtypes
        casts = equation.casts or [None] * len(results)
        roots.update(zip(eqn.outvars, _after_casts(results, casts, reads), strict=True))
    outputs = _after_casts(map(roots_of, jaxpr.outvars), plan.output_dtypes, reads)
    return known.setdefault(id(plan), (reads, outputs))


def _after_casts(
    values: Iterable[Roots], casts: Sequence[np.dtype | None], reads: list[set[np.dtype]]
) -> list[Roots]:
    """Adds the casts of some values to the reads, and returns what the values are behind them."""
    found = []
    for roots, cast in zip(values, casts, strict=True):
        if cast is not None:
            for root in roots:
                reads[root].add(cast)
        found.append(roots if cast is None else _NONE)
    return found


def _hands_on(eqn: Any, plan: EquationPlan, given: Sequence[Roots]) -> bool:
    """Whether each element of the results is one of the operands, in float32.

    Of rounded operands the result is then the rounded result: nothing has been read yet. A sort
    commutes with rounding too, but carries other operands along.
    """
    if isinstance(plan.action, Move):
        return True
    as_it_is = all(d is None for d, roots in zip(plan.operands, given, strict=True) if roots)
    return as_it_is and eqn.primitive.name in _ELEMENTS and isinstance(plan.action, Bind | Keep)


def _by_operand(
    eqn: Any,
    plan: EquationPlan,
    results: list[Roots],
    given: Sequence[Roots],
    known: dict[int, Reads],
) -> list[set[np.dtype]]:
    """Returns the dtypes in which an equation reads each operand.

    Args:
        eqn: The equation.
        plan: Its plan.
        results: Is told which inputs of the program each result is.
        given: Which inputs each operand is.
        known: The jaxprs that have been looked at.
    """
    # As it is: in float32, but where the program rounds it itself.
    target = cast_dtype(eqn)
    as_it_is = target if target in COMPUTE_DTYPES else FLOAT32
    held = bodies(eqn) if plan.inner else ()
    dtypes = [{d or as_it_is} if d or not held else set() for d in plan.operands]
    for body, inner in zip(held, plan.inner, strict=True):
        reads, outputs = _reads(inner, known)
        carried = _carried(body)
        for i, k in enumerate(body.operands):
            if plan.operands[k] is not None:
                continue
            # What a loop carries is another value in the next iteration.
            dtypes[k] |= {FLOAT32} if i in carried else reads[i]
        returned = {output for _, output in body.carries}
        for output, (result, roots) in enumerate(zip(body.results, outputs, strict=True)):
            if result is None or output in returned:
                continue
            inside = [body.operands[i] for i in roots if i not in carried]
            passed = [given[k] for k in inside if plan.operands[k] is None]
            results[result] = results[result].union(*passed)
    return dtypes


def _carried(body: Body) -> set[int]:
    """Returns the inputs of a body that differ in each iteration, and are no slices."""
    if body.carries or None not in body.results:
        return {i for i, _ in body.carries}
    return set(range(body.fixed, len(body.operands)))  # of the predicate of a loop
