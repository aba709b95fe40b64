"""Finds every dtype in which a planned jaxpr reads each of its inputs.

A read of moved elements is a read of the input that holds them. `follow`, `entering` and `leaving`
propagate such a provenance, or any other fact about inputs, through a jaxpr and its bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import AnyJaxpr, Atom, JaxprEqn, Literal, body_of
from ..primitives.reading import cast_dtype
from ..primitives.structure import Body, bodies, isolates
from ..primitives.traits import having
from .data import Bind, EquationPlan, Keep, Move, Plan

V = TypeVar("V")


class Root(NamedTuple):
    """The input whose elements a value holds.

    Args:
        input: The position of the input.
        slices: The number of leading dimensions along which loops slice the input to get the value.
            None if the value holds only a part of the input or of such a slice.
        is_moved: Whether the dimensions of the value may differ from those of the input or slice.
    """

    input: int
    slices: int | None = 0
    is_moved: bool = False

    def sliced(self) -> Root:
        """Returns the root of the slice of this value that one iteration of a loop reads."""
        slices = None if self.is_moved or self.slices is None else self.slices + 1
        return self._replace(slices=slices)

    def moved(self, is_all: bool) -> Root:
        """Returns the root after a move of all elements of the value (``is_all``) or of some."""
        return Root(self.input, self.slices if is_all else None, True)


def follow(
    jaxpr: AnyJaxpr,
    inputs: Sequence[V],
    constant: V,
    step: Callable[[int, Any, list[V]], Sequence[V]],
) -> list[V]:
    """Returns where each output of a jaxpr comes from.

    Args:
        jaxpr: An open or closed jaxpr.
        inputs: Where each of its inputs comes from.
        constant: Where its constants and literals come from.
        step: Takes the index of an equation, the equation and where each operand comes from;
            returns where each result comes from.
    """
    body = body_of(jaxpr)
    found = dict.fromkeys(body.constvars, constant)
    found.update(zip(body.invars, inputs, strict=True))

    def of(atoms: Sequence[Atom]) -> list[V]:
        return [constant if isinstance(v, Literal) else found[v] for v in atoms]

    for i, eqn in enumerate(body.eqns):
        found.update(zip(eqn.outvars, step(i, eqn, of(eqn.invars)), strict=True))
    return of(body.outvars)


def entering(body: Body, given: Sequence[V], made: V) -> list[V]:
    """Returns the origin of each input of a body.

    Args:
        body: One of the bodies of an equation.
        given: The origin of each operand of the equation.
        made: The origin of carries, which the equation itself produces.
    """
    return [made if i in body.carried else given[k] for i, k in enumerate(body.operands)]


def leaving(body: Body, outputs: Sequence[V | None], made: V, count: int) -> list[V]:
    """Returns the origin of each result of an equation with one body.

    Args:
        body: Its body.
        outputs: The origin of each output of the body; None if the equation itself produces it.
        made: The origin of results that the equation itself produces, such as carries.
        count: The number of the equation's results.
    """
    found, carried = [made] * count, {output for _, output in body.carries}
    for k, (result, output) in enumerate(zip(body.results, outputs, strict=True)):
        if result is not None and output is not None and k not in carried:
            found[result] = output
    return found


class Copied(NamedTuple):
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

    Reads that accept both 16 bits and float32, such as comparisons, count as well: an input with
    bfloat16 reads only may be rounded beforehand.

    Args:
        plan: The plan of the program.

    Returns:
        For each input, the dtypes, and `Copied` for an encoding; empty for an unused input.
    """
    reads: list[set[Read]] = [set() for _ in plan.inputs]
    outputs = _follow(plan, [frozenset((Root(i),)) for i in range(len(reads))], reads)
    _read(outputs, [FLOAT32] * len(outputs), reads)
    return reads


def reads_low(plan: Plan) -> list[bool]:
    """Returns whether a jaxpr reads each input in 16 bits only, also after moves."""
    return [bool(reads) and reads.issubset(COMPUTE_DTYPES) for reads in read_dtypes(plan)]


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
            _read(given, _ways(eqn, equation), reads)
        return _read(results, equation.casts or [None] * count, reads)

    return _read(follow(plan.jaxpr, inputs, _NONE, step), plan.output_dtypes, reads)


def _moved(given: Sequence[Roots], is_all: bool) -> Roots:
    return frozenset(root.moved(is_all) for roots in given for root in roots)


def _read(
    values: Sequence[Roots], ways: Sequence[Read | None], reads: list[set[Read]]
) -> list[Roots]:
    """Records how values are read, and returns the inputs that the unread values hold.

    Args:
        values: The inputs that each value holds.
        ways: How each value is read; None if it is not, and a `Copied` for any encoding.
        reads: How each input is read so far.
    """
    for roots, way in zip(values, ways, strict=True):
        if way is not None:
            for root in roots:
                reads[root.input].add(Copied(root.slices) if isinstance(way, Copied) else way)
    return [roots if way is None else _NONE for roots, way in zip(values, ways, strict=True)]


def _hands_on(eqn: JaxprEqn, plan: EquationPlan, given: Sequence[Roots]) -> bool:
    """Whether each element of the results is an element of an operand that is not cast.

    Rounding commutes with such an equation, so that the equation counts as no read. A sort commutes
    as well, but counts as a read, because it reorders other operands along with its keys.
    """
    if isinstance(plan.action, Move):
        return True
    as_it_is = all(d is None for d, roots in zip(plan.operands, given, strict=True) if roots)
    return as_it_is and eqn.primitive.name in _ELEMENTS and isinstance(plan.action, Bind | Keep)


def _ways(eqn: JaxprEqn, plan: EquationPlan) -> list[Read | None]:
    """Returns how an equation without bodies reads each operand."""
    if plan.copies:
        # An operand that is not read through a copy counts as read in float32. So does an
        # activation, even if the equation encodes it.
        copied = dict(plan.copies)
        return [Copied() if k in copied else FLOAT32 for k in range(len(plan.operands))]
    # An operand that the plan does not cast is read in float32, unless the program rounds it.
    target = cast_dtype(eqn)
    return [dtype or (target if target in COMPUTE_DTYPES else FLOAT32) for dtype in plan.operands]


def _inside(
    eqn: JaxprEqn, plan: EquationPlan, given: list[Roots], reads: list[set[Read]]
) -> list[Roots]:
    """Records the reads of inputs in an equation's bodies; returns the inputs its results hold."""
    given = _read(given, plan.operands, reads)
    results = [_NONE] * len(eqn.outvars)
    for body, inner in zip(bodies(eqn), plan.inner, strict=True):
        # The initial value of a carry counts as read in float32, because the carry is another value
        # in the next iteration.
        carried = [FLOAT32 if i in body.carried else None for i in range(len(body.operands))]
        inside = _read([given[k] for k in body.operands], carried, reads)
        for i in range(body.takes_copies_at, len(inside)):
            inside[i] = frozenset(root.sliced() for root in inside[i])
        if isolates(eqn):  # each shard has an encoding of its own
            inside = [_moved([roots], False) for roots in inside]
        outputs = _follow(inner, inside, reads)
        for k, roots in enumerate(leaving(body, outputs, _NONE, len(results))):
            results[k] |= _moved([roots], False)
    return results
