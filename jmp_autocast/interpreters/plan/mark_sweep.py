"""The sweep of marks over a jaxpr, from the first equation to the last.

Like needs (`needs`), marks and images are known before the plan, and they enter and leave a call, a
checkpoint or a branch as if it were inlined. This module also finds the carries of a loop that
accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, aval_of, body_of
from ..primitives.structure import STRUCTURES, Body, bodies, called, is_call
from ..primitives.traits import having
from .images import (
    LINEAR,
    Image,
    Images,
    holds_one_array,
    image_of_result,
    images_of_results,
    with_images,
)
from .marks import (
    CONSTANT,
    NONE,
    NUMBER,
    Marks,
    marks_of_contraction,
    marks_of_result,
)
from .reads import follow

_CONTRACTS = having("contracts")
_DAMPS = having("damps") | _CONTRACTS

Memo: TypeAlias = dict[Any, Any]
"""A cache. It also holds the marks of constants, by their variables."""


class AllMarks(NamedTuple):
    """The forward facts about the values of a jaxpr.

    Args:
        values: The marks of each variable.
        operands: The marks of the operands of each equation; those of an equation with bodies have
            their `images`.
        kinds: A number for each equation, which is the same for equations of one primitive with
            equal parameters, types and marks. None for an equation that is like no other, because
            it has bodies, or a parameter without a hash.
        images: The arrays of which each value is an image; see `images`.
    """

    values: Mapping[Any, Marks]
    operands: Sequence[list[Marks]]
    kinds: Sequence[int | None]
    images: Images


def marks_of(jaxpr: Jaxpr, inputs: Sequence[Marks], memo: Memo) -> AllMarks:
    """Returns the marks in a jaxpr.

    Args:
        jaxpr: An open jaxpr.
        inputs: The marks of its inputs.
        memo: A cache, whose owner keeps the jaxprs alive.
    """
    key = "marks", id(jaxpr), tuple(inputs)
    if (known := memo.get(key)) is not None:
        return known
    pairs = list(zip(jaxpr.invars, inputs, strict=True))
    images: dict[Any, Image] = {v: dict(m.images) for v, m in pairs if m.images}
    values = {v: m._replace(images=()) if m.images else m for v, m in pairs}
    values.update({v: memo.get(v, CONSTANT) for v in jaxpr.constvars})
    operands, kinds = [], []
    for eqn in jaxpr.eqns:
        marks, kind = lookup(values, eqn.invars), None
        if eqn.primitive.name in STRUCTURES:
            marks, arrays = with_images(eqn, marks, images)
            values.update(zip(eqn.outvars, _of_structure(eqn, marks, memo), strict=True))
            if is_call(eqn):
                body = body_of(called(eqn))
                inner = marks_of(body, marks, memo).images
                images.update(images_of_results(eqn, arrays, body, inner, images))
        else:
            kind, of_results = _of_equal(eqn, marks, images, memo)
            values.update(dict.fromkeys(eqn.outvars, of_results))
            if eqn.primitive.name in LINEAR and (image := image_of_result(eqn, marks, images)):
                images.update(dict.fromkeys(eqn.outvars, image))
        operands.append(marks)
        kinds.append(kind)
    memo[key] = found = AllMarks(values, operands, kinds, images)
    return found


def lookup(all_marks: Mapping[Any, Marks], atoms: Sequence[Atom]) -> list[Marks]:
    """Returns the marks of variables and literals."""
    return [_of_number(v) if isinstance(v, Literal) else all_marks.get(v, NONE) for v in atoms]


def _of_number(literal: Literal) -> Marks:
    val, aval = literal.val, aval_of(literal)
    if aval.dtype.kind == "c" or aval.dtype == jax.dtypes.float0:
        return NUMBER
    # NumPy warns at a comparison of a bfloat16 NaN, so Python floats are compared.
    numbers = [float(x) for x in (np.ravel(val) if aval.shape else (val,))]
    bound = -1 if any([x < 0 for x in numbers]) else 1
    return NUMBER._replace(bound=bound, whole=all([x.is_integer() for x in numbers]))


def _of_equal(
    eqn: JaxprEqn, marks: Sequence[Marks], images: Images, memo: Memo
) -> tuple[int | None, Marks]:
    """Returns the kind of an equation and the marks of its results, cached for equal equations."""
    invars = eqn.invars
    is_gram = eqn.primitive.name in _CONTRACTS and holds_one_array(eqn, images)
    is_same = len(invars) > 1 and invars[0] is invars[1]
    avals = [v.aval for v in (*invars, *eqn.outvars)]
    key = (eqn.primitive, is_same, is_gram, *avals, *marks, *eqn.params.values())
    try:
        found = memo.get(key)
    except TypeError:  # a parameter of the equation has no hash
        return None, _of_results(eqn, marks, is_gram)
    if found is None:
        found = memo[key] = len(memo), _of_results(eqn, marks, is_gram)
    return found


def _of_results(eqn: JaxprEqn, marks: Sequence[Marks], is_gram: bool) -> Marks:
    contracts = eqn.primitive.name in _CONTRACTS
    found = marks_of_contraction(eqn, marks, is_gram) if contracts else marks_of_result(eqn, marks)
    return found._replace(fixed=found.fixed or 1) if all([m.fixed for m in marks]) else found


def _of_structure(eqn: JaxprEqn, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    found: list[list[Marks]] = [[] for _ in eqn.outvars]
    for body in bodies(eqn):
        jaxpr = body_of(body.jaxpr)
        inner = marks_of(jaxpr, inputs_of(body, given, memo), memo)
        for r, m in zip(body.results, lookup(inner.values, jaxpr.outvars), strict=True):
            if r is not None:
                found[r].append(m)
    return [Marks.union(several) if several else NONE for several in found]


def inputs_of(body: Body, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of the inputs of a body.

    A carry has the marks of its initial value and those of the value that an iteration returns.

    Args:
        body: The body.
        given: The marks of the operands of its equation.
        memo: As for `marks_of`.
    """
    inputs = [given[k] for k in body.operands]
    for i in body.carried:
        # The condition of a loop has no `carries`: there the carried values get no marks.
        inputs[i] = inputs[i]._replace(images=()) if body.carries else NONE
    return _gone_round(body, inputs, memo)


def _gone_round(body: Body, inputs: list[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of a body's inputs, with the marks that iterations add to carries."""
    before: list[Marks] = []
    while body.carries and inputs != before:  # the loop ends: marks change in one direction only
        before, jaxpr = list(inputs), body_of(body.jaxpr)
        marks = lookup(marks_of(jaxpr, inputs, memo).values, jaxpr.outvars)
        for i, k in body.carries:
            inputs[i] = Marks.union([inputs[i], marks[k]])
    return inputs


# --- carries ---------------------------------------------------------------------------------

_Origins: TypeAlias = frozenset[tuple[int, bool]]
"""Inputs of a body, each with whether the path from it leads through a layer; see `_origins`."""


def accumulated_in(
    body: Body, memo: Memo, parameters: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Returns the carries that are computed from themselves by sums, products and the like.

    A path through a matmul or a convolution does not count: the result is a new value in each step.
    Neither does a path through a sigmoid, whose slope is at most 1/4. Other functions may have a
    slope of 1: 4,096 steps of ``sqrt(h * h + y)`` ended at 11.4 instead of 45.25 in bfloat16.

    Args:
        body: The body of any equation. Without carries, the result is empty.
        memo: As for `marks_of`.
        parameters: The inputs of the body that are parameters, for a result without residual
            streams: carries ``x`` that the body returns as ``x + f(x)``, where ``f`` multiplies
            ``x`` by a parameter. If ``f`` multiplies it by data only, the loop is a solver or an
            optimizer, whose carry is an accumulator.

    Returns:
        The indices of the carries among the outputs of the body.
    """
    if not body.carries:
        return frozenset()
    jaxpr = body_of(body.jaxpr)
    if (key := ("accumulated", id(jaxpr), body.fixed, parameters)) in memo:
        return memo[key]
    carries = dict(body.carries)
    inputs = [frozenset([(i, False)]) for i in range(len(jaxpr.invars))]
    found = _origins(jaxpr, inputs, frozenset([(i, False) for i in parameters]))
    streams = [k for i, k in body.carries if {(i, False), (i, True)} <= found[k]]
    sources = {
        k: [carries[i] for i, layered in found[k] if i in carries and not layered]
        for k in carries.values()
    }

    def returns_to(k: int) -> bool:
        # A carry that reaches itself adds up the rounding errors of all steps, as a running mean
        # does; the state of an RNN, which goes through a matmul, does not. Carries may swap places:
        # the paths are followed over several iterations.
        pending, seen = list(sources[k]), set()
        while pending and k not in seen:
            if (i := pending.pop()) not in seen:
                seen.add(i)
                pending += sources[i]
        return k in seen

    memo[key] = found = frozenset([k for k in sources if k not in streams and returns_to(k)])
    return found


def _origins(jaxpr: Jaxpr, inputs: Sequence[_Origins], parameters: _Origins) -> list[_Origins]:
    """Returns the inputs of a loop's body that reach each output of a jaxpr.

    A path through a matmul or a damping function counts only if it leads through a layer: a matmul
    whose other operand comes from a parameter.

    Args:
        jaxpr: The body of the loop, or of a call in it.
        inputs: The inputs of the loop's body that reach each input of the jaxpr.
        parameters: The inputs of the loop's body that are parameters.
    """

    def step(_: int, eqn: JaxprEqn, operands: list[_Origins]) -> list[_Origins]:
        # `jax.nn.relu` and `jnp.where` are calls: unless their bodies are followed, every output
        # would come from every input.
        if is_call(eqn):
            return _origins(body_of(called(eqn)), operands, parameters)
        found = frozenset[tuple[int, bool]]().union(*operands)
        if eqn.primitive.name in _DAMPS:
            is_layer = not found.isdisjoint(parameters)
            found = frozenset([(i, True) for i, layered in found if layered or is_layer])
        return [found] * len(eqn.outvars)

    return follow(jaxpr, inputs, frozenset(), step)
