"""Provenance of values: facts about the inputs of a jaxpr, propagated through its equations.

The facts differ: the visit that produced a value, the input that it aliases, whether it depends on
parameters alone. Their way into bodies and out of them is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from ..compat import AnyJaxpr, body_of
from ..primitives.evaluate import evaluate
from ..primitives.structure import Body

V = TypeVar("V")


class Root(NamedTuple):
    """An input of a program that a value is, or holds elements of.

    Args:
        input: The position of the input.
        slices: Along how many of its first dimensions the value is a slice of it; None if it has
            other elements than a whole input, or slice.
        is_moved: The value's dimensions are not those of the input, or slice.
    """

    input: int
    slices: int | None = 0
    is_moved: bool = False

    def sliced(self) -> Root:
        """Returns the alias of the slice that one iteration of a loop gets."""
        slices = None if self.is_moved or self.slices is None else self.slices + 1
        return self._replace(slices=slices)

    def moved(self, is_all: bool) -> Root:
        """Returns the alias after a move of all elements of the value, or of some."""
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
            returns where each result does.
    """
    consts = [constant] * len(body_of(jaxpr).constvars)
    # No equation is bound, so no step needs the context of its equation.
    return evaluate(jaxpr, consts, inputs, lambda _: constant, step, lambda _: nullcontext())


def entering(body: Body, given: Sequence[V], made: V) -> list[V]:
    """Returns the origin of each input of a body.

    Args:
        body: One of the bodies of an equation.
        given: The origin of each operand of the equation.
        made: The origin for the equation itself, the producer of its carries.
    """
    return [made if i in body.carried else given[k] for i, k in enumerate(body.operands)]


def leaving(body: Body, outputs: Sequence[V | None], made: V, count: int) -> list[V]:
    """Returns the origin of each result of an equation with one body.

    Args:
        body: Its body.
        outputs: The origin of each output of the body, None for the equation itself.
        made: The origin for the equation itself, the producer of its carries.
        count: The number of its results.
    """
    found, carried = [made] * count, {output for _, output in body.carries}
    for k, (result, output) in enumerate(zip(body.results, outputs, strict=True)):
        if result is not None and output is not None and k not in carried:
            found[result] = output
    return found
