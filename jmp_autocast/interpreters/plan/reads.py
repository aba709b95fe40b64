"""In which dtypes a planned program reads each of its inputs, to the last comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...policies import narrow_dtypes
from ..compat import Literal
from ..primitives.reading import cast_dtype
from ..primitives.structure import bodies, isolates
from ..primitives.traits import having
from .data import Bind, EquationPlan, Keep, Move, Multiply8, Plan


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A product reads a weight in 8 bits.

    Args:
        scales: Along how many of the weight's first dimensions there are scales of their own, one
            for each iteration of a loop. None where the product reads a part of the weight, or a
            shard: no scale of the weight is that of what is read.
    """

    scales: int | None = 0


Read: TypeAlias = np.dtype | Quantized
"""How an equation reads an operand."""


class Root(NamedTuple):
    """An input of a program that a value is.

    Args:
        input: The position of the input.
        is_all: The value has all of its elements.
        is_moved: The value's dimensions are not those of the input.
    """

    input: int
    is_all: bool = True
    is_moved: bool = False

    def reads(self, read: Read) -> Read:
        """Returns how the input is read where the value is read."""
        if not isinstance(read, Quantized):
            return read
        fits = self.is_all and not (self.is_moved and read.scales)
        return read if fits else Quantized(None)


Roots = frozenset[Root]
Reads = tuple[list[set[Read]], list[Roots]]

_NONE: Roots = frozenset()
_ELEMENTS = (having("affine") & having("rounds")) - {"convert_element_type"}
_WHOLE = having("whole")


def read_dtypes(plan: Plan) -> list[set[Read]]:
    """Returns the dtypes in which a program reads each input of the wide dtype, where it moves it.

    ``demands`` asks what would serve the readers, and a comparison does well in either dtype. This
    asks what happens: an input that is read in bfloat16 alone may be rounded to that before.

    Args:
        plan: The plan of the program.

    Returns:
        For each input, the dtypes, and `Quantized` for a product in 8 bits; empty where nothing
        reads it.
    """
    reads, outputs = _reads(plan, {})
    for roots, cast in zip(outputs, plan.output_dtypes, strict=True):
        for root in roots:
            reads[root.input].add(cast or plan.wide)
    return reads


def _reads(plan: Plan, known: dict[int, Reads]) -> Reads:
    """Returns how a jaxpr reads its inputs, and which of them each output is, moved or not."""
    if id(plan) in known:
        return known[id(plan)]
    jaxpr = plan.jaxpr
    reads: list[set[Read]] = [set() for _ in jaxpr.invars]
    roots: dict[Any, Roots] = {v: frozenset((Root(i),)) for i, v in enumerate(jaxpr.invars)}

    def roots_of(atom: Any) -> Roots:
        return _NONE if isinstance(atom, Literal) else roots.get(atom, _NONE)

    for eqn, equation in zip(jaxpr.eqns, plan.equations, strict=True):
        given = list(map(roots_of, eqn.invars))
        if not any(given):
            continue
        results = [_NONE] * len(eqn.outvars)
        if _hands_on(eqn, equation, given):
            is_all = isinstance(equation.action, Move) and eqn.primitive.name in _WHOLE
            results = [_part(_NONE.union(*given), is_all)] * len(results)
        else:
            for k, dtypes in enumerate(
                _by_operand(plan.wide, eqn, equation, results, given, known)
            ):
                for root in given[k]:
                    reads[root.input] |= set(map(root.reads, dtypes))
        casts = equation.casts or [None] * len(results)
        roots.update(zip(eqn.outvars, _after_casts(results, casts, reads), strict=True))
    outputs = _after_casts(map(roots_of, jaxpr.outvars), plan.output_dtypes, reads)
    return known.setdefault(id(plan), (reads, outputs))


def _part(roots: Iterable[Root], is_all: bool) -> Roots:
    """Returns the roots of what is made of the elements of a value, of all of them or of some."""
    return frozenset(Root(root.input, root.is_all and is_all, True) for root in roots)


def _after_casts(
    values: Iterable[Roots], casts: Sequence[np.dtype | None], reads: list[set[Read]]
) -> list[Roots]:
    """Adds the casts of some values to the reads, and returns what the values are behind them."""
    found = []
    for roots, cast in zip(values, casts, strict=True):
        if cast is not None:
            for root in roots:
                reads[root.input].add(cast)
        found.append(roots if cast is None else _NONE)
    return found


def _hands_on(eqn: Any, plan: EquationPlan, given: Sequence[Roots]) -> bool:
    """Whether each element of the results is one of the operands, as wide as it is.

    Of rounded operands the result is then the rounded result: nothing has been read yet. A sort
    commutes with rounding too, but carries other operands along.
    """
    if isinstance(plan.action, Move):
        return True
    as_it_is = all(d is None for d, roots in zip(plan.operands, given, strict=True) if roots)
    return as_it_is and eqn.primitive.name in _ELEMENTS and isinstance(plan.action, Bind | Keep)


def _by_operand(
    wide: np.dtype,
    eqn: Any,
    plan: EquationPlan,
    results: list[Roots],
    given: Sequence[Roots],
    known: dict[int, Reads],
) -> list[set[Read]]:
    """Returns the dtypes in which an equation reads each operand.

    Args:
        wide: The wide dtype of the policy.
        eqn: The equation.
        plan: Its plan.
        results: Is told which inputs of the program each result is.
        given: Which inputs each operand is.
        known: The jaxprs that have been looked at.
    """
    if isinstance(plan.action, Multiply8):
        # An activation is quantized as it is, too, but is stored nowhere.
        return [{Quantized()} if i == plan.action.weight else {wide} for i in (0, 1)]
    # As it is: in the wide dtype, but where the program rounds it itself.
    target = cast_dtype(eqn)
    as_it_is = target if target in narrow_dtypes(wide) else wide
    held = bodies(eqn) if plan.inner else ()
    dtypes: list[set[Read]] = [{d or as_it_is} if d or not held else set() for d in plan.operands]
    for body, inner in zip(held, plan.inner, strict=True):
        reads, outputs = _reads(inner, known)
        carried = body.carried
        for i, k in enumerate(body.operands):
            if plan.operands[k] is not None:
                continue
            # What a loop carries is another value in the next iteration.
            is_slice = i >= body.takes_copies_at
            inside = {_outside(read, is_slice, isolates(eqn)) for read in reads[i]}
            dtypes[k] |= {wide} if i in carried else inside
        returned = {output for _, output in body.carries}
        for output, (result, roots) in enumerate(zip(body.results, outputs, strict=True)):
            if result is None or output in returned:
                continue
            inside = [body.operands[root.input] for root in roots if root.input not in carried]
            passed = [given[k] for k in inside if plan.operands[k] is None]
            results[result] |= _part(_NONE.union(*passed), is_all=False)
    return dtypes


def _outside(read: Read, is_slice: bool, is_shard: bool) -> Read:
    """Returns how an operand is read that a body reads, or slices of which it reads."""
    if not isinstance(read, Quantized) or read.scales is None:
        return read
    return Quantized(None if is_shard else read.scales + is_slice)
