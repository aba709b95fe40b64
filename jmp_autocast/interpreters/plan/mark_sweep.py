"""The sweep of marks over a jaxpr, from the first equation to the last.

Like needs (`needs`), marks and images are known before the plan, and they enter and leave a call, a
checkpoint or a branch as if it were inlined. This module also finds the carries of a loop that
accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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

_CONTRACTS = having("contracts")
_DAMPS = having("damps") | _CONTRACTS

Memo: TypeAlias = dict[Any, Any]


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
    values.update(dict.fromkeys(jaxpr.constvars, CONSTANT))
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
    if aval.dtype.kind == "c":
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
    return found._replace(fixed=True) if all([m.fixed for m in marks]) else found


def _of_structure(eqn: JaxprEqn, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    found: list[list[Marks]] = [[] for _ in eqn.outvars]
    for body in bodies(eqn):
        jaxpr = body_of(body.jaxpr)
        inner = marks_of(jaxpr, inputs_of(body, given, memo), memo)
        accumulated = accumulated_in(body, memo)
        for k, (r, m) in enumerate(
            zip(body.results, lookup(inner.values, jaxpr.outvars), strict=True)
        ):
            if r is not None:
                found[r].append(m._replace(summed=True) if k in accumulated else m)
    marks = [Marks.union(several) if several else NONE for several in found]
    return [m._replace(fixed=True) for m in marks] if all([m.fixed for m in given]) else marks


def inputs_of(body: Body, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of the inputs of a body.

    A carry has the marks of its initial value and those of the value that an iteration returns.

    Args:
        body: The body.
        given: The marks of the operands of its equation.
        memo: As for `marks_of`.
    """
    carried, operands = body.carried, enumerate(body.operands)
    # The condition of a loop has no `carries`: there the carried values get no marks.
    if not body.carries:
        return [NONE if i in carried else given[k] for i, k in operands]
    inputs = [given[k]._replace(images=()) if i in carried else given[k] for i, k in operands]
    return _gone_round(body, inputs, memo)


def _gone_round(body: Body, inputs: list[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of a loop's inputs, with the marks that iterations add to carries."""
    jaxpr = body_of(body.jaxpr)
    while True:
        before = list(inputs)
        marks = lookup(marks_of(jaxpr, inputs, memo).values, jaxpr.outvars)
        for i, k in body.carries:
            inputs[i] = Marks.union([inputs[i], marks[k]])
        if inputs == before:  # the loop ends: marks change in one direction only
            return inputs


# --- carries ---------------------------------------------------------------------------------


def accumulated_in(body: Body, memo: Memo) -> frozenset[int]:
    """Returns the carries that are computed from themselves by sums, products and the like.

    A path through a matmul or a convolution does not count: the result is a new value in each step.
    Neither does a path through a sigmoid, whose slope is at most 1/4. Other functions may have a
    slope of 1: 4,096 steps of ``sqrt(h * h + y)`` ended at 11.4 instead of 45.25 in bfloat16.

    Args:
        body: The body of any equation. Without carries, the result is empty.
        memo: As for `marks_of`.

    Returns:
        The indices of the carries among the outputs of the body.
    """
    if not body.carries:
        return frozenset()
    jaxpr = body_of(body.jaxpr)
    if (key := ("accumulated", id(jaxpr), body.fixed)) in memo:
        return memo[key]
    carries = dict(body.carries)
    found = _origins(jaxpr, frozenset())
    sources = {k: [carries[i] for i in found[k].cheap if i in carries] for k in carries.values()}

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

    memo[key] = accumulating = frozenset([k for k in sources if returns_to(k)])
    return accumulating


def residual_streams(body: Body, parameters: frozenset[int]) -> frozenset[int]:
    """Returns the carries ``x`` that the body returns as ``x + f(x)``, with layers in ``f``.

    A layer multiplies the carry by a parameter. If ``f`` multiplies it by data only, the loop is a
    solver or an optimizer, whose carry is an accumulator.

    Args:
        body: The loop's body.
        parameters: The inputs of the body that are parameters.
    """
    found = _origins(body_of(body.jaxpr), parameters)
    return frozenset([k for i, k in body.carries if i in found[k].cheap & found[k].layered])


class _Origins(NamedTuple):
    """The inputs of a body that reach a value on cheap or on layered paths; see `_origins`."""

    cheap: frozenset[int] = frozenset()
    layered: frozenset[int] = frozenset()


def _origins(
    body: Jaxpr, parameters: frozenset[int], inputs: Sequence[_Origins] | None = None
) -> list[_Origins]:
    """Returns, for each output, the inputs that reach it.

    The path of a ``cheap`` input has no matmul and no damping function. The path of a ``layered``
    input has a matmul whose other operand comes from a parameter.

    Args:
        body: The body of a loop, or of a call in it.
        parameters: The inputs of the loop's body that are parameters.
        inputs: For each input of a call's body, the inputs of the loop's body that reach it.
    """
    if inputs is None:
        inputs = [_Origins(frozenset((i,))) for i in range(len(body.invars))]
    found, nowhere = dict(zip(body.invars, inputs, strict=True)), _Origins()

    def of(atoms: Sequence[Atom]) -> list[_Origins]:
        return [nowhere if isinstance(v, Literal) else found.get(v, nowhere) for v in atoms]

    for eqn in body.eqns:
        operands = of(eqn.invars)
        if not any([it.cheap or it.layered for it in operands]):
            continue
        # `jax.nn.relu` and `jnp.where` are calls: unless their bodies are followed, every output
        # would come from every input.
        if is_call(eqn):
            results = _origins(body_of(called(eqn)), parameters, operands)
        else:
            cheap, layered = (frozenset().union(*sets) for sets in zip(*operands, strict=True))
            if eqn.primitive.name in _DAMPS:
                layered, cheap = layered | cheap if cheap & parameters else layered, frozenset()
            results = [_Origins(cheap, layered)] * len(eqn.outvars)
        found.update(zip(eqn.outvars, results, strict=True))
    return of(body.outvars)
