"""The planner's first sentence on what it emits: 16 bits between products, and nowhere else.

A value *leads* to a product if one consumes it through elementwise operations and moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jmp_autocast.interpreters.compat import Literal, body_of
from jmp_autocast.interpreters.primitives.structure import STRUCTURES, bodies
from tests.support.jaxprs import inner_jaxprs

from .comparison import Unsupported
from .error_model import CALLS, COMPARISONS, Evaluation, Precision
from .facts import CONTRACTIONS, ELEMENTWISE_FULL, MOVEMENT, SUMS, Fact

PRODUCTS = CONTRACTIONS | {"accumulate"}
# What only chooses elements, or their negatives, is left out: rounding commutes with it.
COMPUTES = frozenset(
    """
    add add_any sub mul div rem atan2 square integer_pow tanh logistic erf erfc sin cos sqrt cbrt
    """.split()
)
_ENDS = SUMS | ELEMENTWISE_FULL | COMPARISONS | frozenset("floor ceil round is_finite".split())
_LOW = ("bfloat16", "float16")


@dataclasses.dataclass
class Found:
    """The values of a program that lead to a product, and what computes in 16 bits without."""

    leads: set[Any] = dataclasses.field(default_factory=set)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def look_at(self, jaxpr: Any, returned: Sequence[bool] | None = None) -> list[bool]:
        """Goes over a jaxpr from its last equation; returns which inputs lead to a product."""
        body = body_of(jaxpr)
        returned = returned or [False] * len(body.outvars)
        self._add(v for v, lead in zip(body.outvars, returned, strict=True) if lead)
        for eqn in reversed(body.eqns):
            name, result = eqn.primitive.name, [v.aval for v in eqn.outvars]
            is_led = any(v in self.leads for v in eqn.outvars)
            if name in STRUCTURES:
                self._look_inside(eqn)
            elif (
                name in PRODUCTS
                or any(inner_jaxprs(eqn))
                or (is_led and name not in _ENDS and _is_float(result[0]))
            ):
                self._add(eqn.invars)
            if name in COMPUTES and not is_led and str(result[0].dtype) in _LOW:
                self.wrong.append(str(eqn))
        return [v in self.leads for v in body.invars]

    def _add(self, atoms: Iterator[Any] | Sequence[Any]) -> None:
        self.leads.update(v for v in atoms if not isinstance(v, Literal))

    def _look_inside(self, eqn: Any) -> None:
        held = bodies(eqn)
        returned = [
            [r is not None and eqn.outvars[r] in self.leads for r in body.results] for body in held
        ]
        while True:  # what leads to a product in the next iteration leads to one in this
            before, inner, leads = [list(r) for r in returned], Found(), set()
            for body, outputs in zip(held, returned, strict=True):
                led = inner.look_at(body.jaxpr, outputs)
                leads |= {i for i, lead in zip(body.operands, led, strict=True) if lead}
            for body, outputs in zip(held, returned, strict=True):
                for i, k in body.carries:
                    outputs[k] |= body.operands[i] in leads
            if returned == before:
                break
        self.leads |= inner.leads
        self.wrong += inner.wrong
        self._add(eqn.invars[i] for i in leads)


def _is_float(aval: Any) -> bool:
    return str(aval.dtype) in ("float32", *_LOW)


def computed_low_without_a_product(jaxpr: Any) -> list[str]:
    """Returns the equations that compute in 16 bits although no product consumes the result."""
    found = Found()
    found.look_at(jaxpr)
    return found.wrong


class _Recorded(Evaluation):
    """Evaluates a program, and remembers the results of its products."""

    def __init__(self) -> None:
        super().__init__(Precision(frozenset()), None)
        self.products: list[Any] = []

    def equation(
        self, eqn: Any, xs: list[Any], facts: Sequence[Fact]
    ) -> tuple[list[Any], Sequence[Fact]]:
        if eqn.primitive.name in ("scan", "while", "cond"):
            raise Unsupported("products in a loop or a branch have no order")
        results, known = super().equation(eqn, xs, facts)
        if eqn.primitive.name in PRODUCTS:
            self.products.append(results[0])
        return results, known


class _Replayed(_Recorded):
    """Evaluates a program in float32 with the products of another; knows what must not differ.

    `Fact.full` marks what is made of arguments and of products by operations that lead to none.
    """

    def __init__(self, products: Sequence[Any], leads: set[Any]) -> None:
        super().__init__()
        self._given, self._leads = list(reversed(products)), leads

    def equation(
        self, eqn: Any, xs: list[Any], facts: Sequence[Fact]
    ) -> tuple[list[Any], Sequence[Fact]]:
        name = eqn.primitive.name
        if name in PRODUCTS:
            product, aval = self._given.pop() if self._given else None, eqn.outvars[0].aval
            if getattr(product, "shape", None) != aval.shape:
                raise Unsupported("products in another order")
            return [product.astype(aval.dtype)], (Fact(full=True),)
        results, known = super().equation(eqn, xs, facts)
        if name in CALLS:
            return results, known
        floats = [f for v, f in zip(eqn.invars, facts, strict=True) if _is_float(v.aval)]
        plain = name in COMPUTES | ELEMENTWISE_FULL | SUMS or (
            name in MOVEMENT and len(floats) == 1
        )
        plain &= not any(v in self._leads for v in eqn.outvars)
        same = plain and bool(floats) and all(f.full or f.literal for f in floats)
        return results, (Fact(full=same),) * len(results)


def replayed(plain: Any, cast: Any, leaves: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """Returns the outputs that lead to no product, as float32 computes them and as found.

    Args:
        plain: The jaxpr of the plain program.
        cast: That of the program under `autocast`.
        leaves: The arguments.
    """
    recorded, found = _Recorded(), Found()
    results = recorded.run(cast, leaves)
    found.look_at(plain)
    again = _Replayed(recorded.products, found.leads)
    expected, facts = again._call(plain, leaves, [Fact(full=True)] * len(leaves))
    triples = zip(range(len(results)), expected, results, facts, strict=True)
    return [(i, want, got) for i, want, got, fact in triples if fact.full]
