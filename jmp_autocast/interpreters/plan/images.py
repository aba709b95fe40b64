"""Finds differences that cancel, because both operands are linear images of one array.

A linear image is an array after moves, scales, contractions and solves. Examples are a value less
its average, ``x - blur(x)``, or its projection, ``x - (x Q) Q.T``, and a covariance less its
rank-one update, ``P - (P x)(x P) / s``. If 16-bit products compute the images, the difference keeps
almost no digits.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, body_of
from ..primitives.structure import STRUCTURES, called, is_call
from ..primitives.traits import having
from .avals import at_least, element_count, is_as_large
from .mark_sweep import AllMarks, Memo, given_to, marks_of, moved_in
from .marks import NONE, Marks


class Made(enum.IntFlag):
    """How an image is computed from an array, besides moves and scales.

    Attributes:
        AVERAGED: By a contraction with a fixed operand, such as a window or a matrix of averages.
        PROJECTED: By another contraction.
        RETURNED: By contractions with a matrix and with its transpose, such as ``(x Q) Q.T``.
        SQUARED: By a product of two projections of one array.
        SUBTRACTED: As a fixed array less a projection, such as ``I - K H`` of a Kalman filter.
    """

    AVERAGED = enum.auto()
    PROJECTED = enum.auto()
    RETURNED = enum.auto()
    SQUARED = enum.auto()
    SUBTRACTED = enum.auto()


ITSELF = Made(0)
Images: TypeAlias = Mapping[Any, Mapping[Any, Made]]

_CONTRACTS = having("contracts")
_JOINS = having("joins")
_MOVES = having("moves") | _JOINS | {"convert_element_type", "neg", "reduce_window_sum", "div"}
_SOLVES = frozenset(("custom_linear_solve", "triangular_solve"))
_LINEAR = _MOVES | _SOLVES | _CONTRACTS | {"mul", "sub"}
_MAX_IMAGES = 8


class Facts(NamedTuple):
    """The forward facts about the values of a jaxpr.

    Args:
        marks: The result of `marks_of`.
        moved: The result of `moved_in`.
        images: The arrays of which each value is an image, and how each image is computed.
        given: The marks of the operands of each equation with bodies, by its index; those of a call
            have their `images`.
    """

    marks: AllMarks
    moved: Mapping[Any, Atom]
    images: Images
    given: Mapping[int, list[Marks]]


def facts_of(jaxpr: Jaxpr, inputs: Sequence[Marks], memo: Memo) -> Facts:
    """Returns the forward facts about the values of a jaxpr.

    Args:
        jaxpr: An open jaxpr.
        inputs: The marks of its inputs.
        memo: As for `marks_of`.
    """
    key = "facts", id(jaxpr), tuple(inputs)
    if (known := memo.get(key)) is not None:
        return known
    all_marks, moved = marks_of(jaxpr, inputs, memo), moved_in(jaxpr, inputs, memo)
    pairs = zip(jaxpr.invars, inputs, strict=True)
    images: dict[Any, Mapping[Any, Made]] = {v: dict(m.images) for v, m in pairs if m.images}
    given: dict[int, list[Marks]] = {}
    for i, (eqn, marks) in enumerate(zip(jaxpr.eqns, all_marks.operands, strict=True)):
        if eqn.primitive.name in _LINEAR:
            if made := _of_result(eqn, marks, images, all_marks.values):
                images.update(dict.fromkeys(eqn.outvars, made))
        elif eqn.primitive.name in STRUCTURES:
            given[i] = _with_images(eqn, given_to(eqn, marks, moved), images)
            if is_call(eqn):
                images.update(_returned(eqn, given[i], images, memo))
    memo[key] = found = Facts(all_marks, moved, images, given)
    return found


def _with_images(eqn: JaxprEqn, given: list[Marks], images: Images) -> list[Marks]:
    """Returns the marks of the operands of a call or a loop; those of a call have their `images`.

    In the body of a `jit` of ``p - outer(gain, a @ p)``, only `images` shows that the gain is
    computed from ``p``.
    """
    numbers = _numbers(eqn, images)
    if not numbers:
        return given
    found = [{numbers[a]: how for a, how in image_of(v, images).items()} for v in eqn.invars]
    pairs = zip(given, found, strict=True)
    return [m._replace(images=tuple(image.items())) for m, image in pairs]


def _numbers(eqn: JaxprEqn, images: Images) -> dict[Any, int]:
    """Returns a number for each array that has images among the operands of a call.

    Returns {} unless one operand holds such an array itself, and another is computed from it.
    """
    found = [image_of(v, images) for v in eqn.invars] if is_call(eqn) else []
    made = [(array, how) for image in found for array, how in image.items()]
    plain = {array for array, how in made if not how}
    if not any([how and array in plain for array, how in made]):
        return {}
    return {array: k for k, array in enumerate(dict.fromkeys([array for array, _ in made]))}


def image_of(v: Atom, images: Images) -> Mapping[Any, Made]:
    """Returns the arrays of which a value is an image, the value itself if there are none."""
    return {} if isinstance(v, Literal) else images.get(v) or {v: ITSELF}


def cancelled(eqn: JaxprEqn, marks: Sequence[Marks], images: Images) -> list[Atom]:
    """Returns operands of a difference that nearly cancel, because both are images of one array.

    Args:
        eqn: A difference.
        marks: The marks of its operands.
        images: As for `Facts`.
    """
    a, b = (image_of(v, images) for v in eqn.invars)
    found: list[Atom] = []
    for array in a.keys() & b.keys():
        pair = {a[array], b[array]}
        if Made.AVERAGED in pair and pair <= {ITSELF, Made.AVERAGED}:
            found += [v for v, m in zip(eqn.invars, (a, b), strict=True) if m[array]]
        if pair == {ITSELF} and all([m.averaged == 2 for m in marks]):
            found += eqn.invars  # both operands hold elements of one average
        if ITSELF in pair and any([m & (Made.SQUARED | Made.RETURNED) for m in pair]):
            found += [v for v, m in zip(eqn.invars, (a, b), strict=True) if m[array]]
    return found


def multiplies_complement(eqn: JaxprEqn, images: Images) -> bool:
    """Returns whether a contraction is ``(I - K H) @ P`` with a ``K`` that is computed from ``P``.

    Args:
        eqn: The contraction.
        images: As for `Facts`.
    """
    a, b = (image_of(v, images) for v in eqn.invars[:2])
    return any([(a[v] | b[v]) & Made.SUBTRACTED for v in a.keys() & b.keys()])


def _of_result(
    eqn: JaxprEqn, marks: Sequence[Marks], images: Images, values: Mapping[Any, Marks]
) -> Mapping[Any, Made]:
    name = eqn.primitive.name
    if name in _MOVES:
        if name not in _JOINS:
            return image_of(eqn.invars[0], images)
        found = [image_of(v, images) for v in eqn.invars]
        return {} if len(found) > _MAX_IMAGES else {v: m for it in found for v, m in it.items()}
    if name in _SOLVES:
        return image_of(eqn.invars[-1], images)
    a, b = [image_of(v, images) for v in eqn.invars[:2]]
    ma, mb = marks[:2]
    if name == "sub":
        projected = [(v, m) for v, m in b.items() if ma.fixed and m & Made.PROJECTED]
        return {v: m | Made.SUBTRACTED for v, m in projected}
    if name == "mul":
        if ma.fixed or _is_number(eqn.invars[0], ma):
            return b
        if mb.fixed or _is_number(eqn.invars[1], mb):
            return a
    elif ma.fixed or mb.fixed:
        return {v: m | Made.AVERAGED for v, m in (b if ma.fixed else a).items()}
    both = a.keys() & b.keys()
    # A tied autoencoder, whose matrix is a parameter, keeps its 16-bit products.
    both_ways = [v for v in both if {a[v], b[v]} == {ITSELF, Made.PROJECTED}]
    is_back = name != "mul" and any([values.get(v, NONE).given != 2 for v in both_ways])
    back = Made.RETURNED if is_back else ITSELF
    squared = {v: Made.SQUARED for v in both if a[v] & b[v] & Made.PROJECTED}
    is_outer = not any([is_as_large(v, eqn.outvars[0]) for v in eqn.invars])
    if squared or (name == "mul" and not is_outer) or len(a) + len(b) > _MAX_IMAGES:
        return squared
    found = {v: a.get(v, ITSELF) | b.get(v, ITSELF) | Made.PROJECTED for v in (*a, *b)}
    return {v: how | back if v not in both else how for v, how in found.items()}


def _is_number(v: Atom, marks: Marks) -> bool:
    return marks.spread == 1 or at_least(1, element_count(v))


def _returned(
    eqn: JaxprEqn, given: Sequence[Marks], images: Images, memo: Memo
) -> dict[Any, Mapping[Any, Made]]:
    """Returns, for each result of a call, the arrays outside of the call that it is an image of."""
    body = body_of(called(eqn))
    inner = facts_of(body, given, memo).images
    outer: dict[Any, Any] = dict(
        zip(body.invars, [image_of(v, images) for v in eqn.invars], strict=True)
    )
    outer.update({k: {array: ITSELF} for array, k in _numbers(eqn, images).items()})
    found: dict[Any, Mapping[Any, Made]] = {}
    for v, w in zip(eqn.outvars, body.outvars, strict=True):
        pairs = [(outer.get(u, {}), how) for u, how in image_of(w, inner).items()]
        if made := {array: how | m for image, how in pairs for array, m in image.items()}:
            found[v] = made
    return found
