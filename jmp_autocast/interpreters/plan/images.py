"""Finds differences that cancel, because both operands are linear images of one array.

A linear image is an array after moves, scales, contractions and solves. Examples are a value less
its average, ``x - blur(x)``, or its projection, ``x - (x Q) Q.T``, and a covariance less its
rank-one update, ``P - (P x)(x P) / s``. If 16-bit products compute the images, the difference keeps
almost no digits.

How an image is computed is `ITSELF` for an array that is only moved or cast, else a sum of flags:

| flag | the array is ... |
|---|---|
| SCALED | scaled, joined with other values or solved for |
| AVERAGED | contracted with a fixed operand, such as a window or a matrix of averages |
| PROJECTED | contracted with another operand |
| RETURNED | contracted with a matrix and its transpose, as ``(x Q) Q.T``, and scaled by no number |
| SQUARED | in a product of two projections |
| SUBTRACTED | projected and subtracted from a fixed array, as in ``I - K H`` of a Kalman filter |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, Var
from ..primitives.structure import is_call
from ..primitives.traits import having
from .avals import at_least, element_count, is_as_large
from .marks import NUMBER, PARAMETER, REARRANGES, Marks

ITSELF = 0
SCALED, AVERAGED, PROJECTED, RETURNED, SQUARED, SUBTRACTED = (1 << k for k in range(6))

Image: TypeAlias = Mapping[Any, int]
"""The arrays of which a value is an image, and how it is computed from each."""
Images: TypeAlias = Mapping[Any, Image]

_CONTRACTS = having("contracts")
_JOINS = having("joins")
_SCALES = frozenset(("neg", "reduce_window_sum", "div"))
_SOLVES = frozenset(("custom_linear_solve", "triangular_solve"))
LINEAR = REARRANGES | _JOINS | _SCALES | _SOLVES | _CONTRACTS | {"mul", "sub"}
_MAX_IMAGES = 12


def image_of(v: Atom, images: Images) -> Image:
    """Returns the arrays of which a value is an image, the value itself if there are none."""
    return {} if isinstance(v, Literal) else images.get(v) or {v: ITSELF}


def holds_one_array(eqn: JaxprEqn, images: Images) -> bool:
    """Returns whether the first two operands hold the elements of one array."""
    a, b = (image_of(v, images) for v in eqn.invars[:2])
    return any([a[v] == b[v] == ITSELF for v in a.keys() & b.keys()])


def is_quadratic(eqn: JaxprEqn, images: Images) -> bool:
    """Returns whether a contraction is ``(a @ p) @ a``: one operand is computed from the other."""
    a, b = (image_of(v, images) for v in eqn.invars[:2])
    return _goes_back(a, b) or _goes_back(b, a)


def multiplies_complement(eqn: JaxprEqn, images: Images) -> bool:
    """Returns whether a contraction is ``(I - K H) @ P`` with a ``K`` that is computed from ``P``.

    Args:
        eqn: The contraction.
        images: The images in its jaxpr.
    """
    a, b = (image_of(v, images) for v in eqn.invars[:2])
    return any([(a[v] | b[v]) & SUBTRACTED for v in a.keys() & b.keys()])


def cancelled(eqn: JaxprEqn, marks: Sequence[Marks], images: Images) -> list[Atom]:
    """Returns operands of a difference that nearly cancel, because both are images of one array.

    Args:
        eqn: A difference.
        marks: The marks of its operands.
        images: The images in its jaxpr.
    """
    a, b = (image_of(v, images) for v in eqn.invars)
    found: list[Atom] = []
    for array in a.keys() & b.keys():
        pair = a[array] & ~SCALED, b[array] & ~SCALED
        joined = pair[0] | pair[1]
        is_back = ITSELF in pair and joined & (SQUARED | RETURNED)
        # The operands may be slices of one average, but not two operands of a call.
        is_average = joined == AVERAGED or (joined == ITSELF and isinstance(array, Var))
        if is_back or is_average:
            operands = zip(eqn.invars, pair, marks, strict=True)
            found += [v for v, how, m in operands if how or m.averaged == 2]
    return found


def image_of_result(eqn: JaxprEqn, marks: Sequence[Marks], images: Images) -> Image:
    """Returns the arrays of which the result of an equation in `LINEAR` is an image, {} if of none.

    The result of an equation that does more than move or cast is an array of its own, too.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        images: The images in its jaxpr, up to this equation.
    """
    if eqn.primitive.name in REARRANGES:
        return image_of(eqn.invars[0], images)
    image = _computed(eqn, marks, images)
    return {**image, eqn.outvars[0]: ITSELF} if 0 < len(image) <= _MAX_IMAGES else {}


def _computed(eqn: JaxprEqn, marks: Sequence[Marks], images: Images) -> Image:
    name, found = eqn.primitive.name, [image_of(v, images) for v in eqn.invars]
    if name in _JOINS:
        return _scaled({v: how for image in found for v, how in image.items()})
    if name in _SOLVES:
        return _scaled(found[-1])
    if name in _SCALES:
        is_number = name == "div" and marks[1].given == NUMBER.given
        return _scaled(found[0], RETURNED if is_number else ITSELF)
    (a, b), (ma, mb) = found[:2], marks[:2]
    if name == "sub":
        projected = [(v, how) for v, how in b.items() if ma.fixed and how & PROJECTED]
        return {v: how | SUBTRACTED for v, how in projected}
    if name == "mul":
        for factor, m, image in ((eqn.invars[0], ma, b), (eqn.invars[1], mb, a)):
            if m.fixed or m.spread == 1 or at_least(1, element_count(factor)):
                return _scaled(image, RETURNED if m.given == NUMBER.given else ITSELF)
    elif ma.fixed or mb.fixed:
        return {v: how | AVERAGED for v, how in (b if ma.fixed else a).items()}
    both = a.keys() & b.keys()
    squared = {v: SQUARED for v in both if a[v] & b[v] & PROJECTED}
    is_outer = not any([is_as_large(v, eqn.outvars[0]) for v in eqn.invars])
    if squared or (name == "mul" and not is_outer):
        return squared
    # A tied autoencoder, whose matrix is a parameter, keeps its 16-bit products.
    sides = ((a, b, mb), (b, a, ma)) if name != "mul" else ()
    is_back = any([_goes_back(x, y) and m.given != PARAMETER.given for x, y, m in sides])
    made = {v: a.get(v, ITSELF) | b.get(v, ITSELF) | PROJECTED for v in (*a, *b)}
    # `(x Q) Q.T` is an image of `x`, and `(P h k) P` a product of two projections of `P`.
    return {v: how | is_back * (SQUARED if v in both else RETURNED) for v, how in made.items()}


def _scaled(image: Image, lost: int = ITSELF) -> Image:
    return {v: (how | SCALED) & ~lost for v, how in image.items()}


def _goes_back(projected: Image, matrix: Image) -> bool:
    pairs = [(projected[v], matrix[v]) for v in projected.keys() & matrix.keys()]
    return any([a & ~SCALED in (AVERAGED, PROJECTED) and b == ITSELF for a, b in pairs])


def with_images(
    eqn: JaxprEqn, marks: Sequence[Marks], images: Images
) -> tuple[list[Marks], Sequence[Any]]:
    """Returns the marks of the operands of an equation with bodies, with their `images`.

    They have none unless several operands have an array in common. In the body of a `jit` of
    ``a @ b.T``, only `images` shows that ``a`` and ``b`` are one array: without them, distances
    from a Gram matrix were 20 % off in bfloat16, and 0.6 % when written inline.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        images: The images in its jaxpr, up to this equation.

    Returns:
        The marks, and the arrays by their numbers in `images`.
    """
    # A loop may read slices, and rows of an array are not rows of its transpose: there an image
    # counts for a call only.
    found = [image_of(v, images if is_call(eqn) else {}) for v in eqn.invars]
    count = Counter([array for image in found for array in image])
    pairs = [pair for image in found for pair in image.items()]
    shared = {v for v, how in pairs if count[v] > 1 and how & ~SCALED == ITSELF}
    if not shared:
        return list(marks), ()
    numbers: dict[Any, int] = {}
    given = []
    for m, image in zip(marks, found, strict=True):
        held = [(v, how) for v, how in image.items() if v in shared or how == ITSELF]
        numbered = [(numbers.setdefault(v, len(numbers)), how) for v, how in held]
        given.append(m._replace(images=tuple(numbered)))
    return given, list(numbers)


def images_of_results(
    eqn: JaxprEqn, arrays: Sequence[Any], body: Jaxpr, inner: Images, images: Images
) -> Images:
    """Returns, for each result of a call, the arrays outside of the call that it is an image of.

    Args:
        eqn: The call.
        arrays: The second result of `with_images`.
        body: The body.
        inner: The images in the body.
        images: The images in the jaxpr of the call, up to the call.
    """
    pairs = (*zip(body.invars, eqn.invars, strict=True), *enumerate(arrays))
    outer: dict[Any, Image] = {w: image_of(v, images) for w, v in pairs}
    found: dict[Any, Image] = {}
    for result, v in zip(eqn.outvars, body.outvars, strict=True):
        image = image_of(v, inner).items()
        # Another result may hold the elements of this one.
        outer |= {w: {result: ITSELF} for w, how in image if how == ITSELF and w not in outer}
        found[result] = {a: how | m for w, how in image for a, m in outer.get(w, {}).items()}
    return found
