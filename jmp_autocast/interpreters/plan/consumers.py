"""Records in which dtypes consumers read each value of a jaxpr, from the last equation on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..compat import Atom, Jaxpr, JaxprEqn, Literal
from ..primitives.structure import bodies
from ..primitives.traits import having
from .data import EquationPlan, ReasonCode, Request, Use
from .needs import NOTHING, Need, Needs

_CONTRACTS = having("contracts")
_FUSES = having("fuses")
_ROUNDS = having("rounds")
_INDEXED = Need.SHARP | Need.SNAP
# Attributes of an enum are slow in Python 3.11, and a sweep would look them up for each operand.
_NONE, _LOW, _FULL = Use.NONE, Use.LOW, Use.FULL
_LOW_CONTRACTION = (ReasonCode.LOWER_PRECISION, ReasonCode.DOT_OUT)
OUTPUT = "the output"


@dataclasses.dataclass(slots=True)
class Uses:
    """How consumers read a value.

    Args:
        use: The dtypes in which they read it.
        fulls: How many equations read it in float32, or move it for equations that do.
        first: The first primitive in program order that reads it.
    """

    use: Use = Use.NONE
    fulls: int = 0
    first: str = ""

    def as_request(self, needs: int) -> Request:
        """Returns the request of these consumers to the producer of the value."""
        fulls = min(self.fulls, 2)
        return Request(None, self.use, needs, fulls, self.first, is_known=True)


UNUSED = Uses()


class Consumers:
    """How consumers read each value of a jaxpr; equations are added from the last to the first.

    Args:
        jaxpr: The open jaxpr.
        requests: The request for each output.
        needs: The needs of each value.
    """

    def __init__(self, jaxpr: Jaxpr, requests: Sequence[Request], needs: Needs) -> None:
        self._needs = needs
        self._inputs = jaxpr.invars
        self._reads: dict[Any, Uses] = {}
        for v, request in zip(jaxpr.outvars, requests, strict=True):
            if isinstance(v, Literal):
                continue
            if request.dtype is not None:
                self._read(v, Use.of(request.dtype), OUTPUT)
            elif request.is_known:
                self._read(v, request.use, request.consumer, request.fulls)
            else:
                # The consumers outside the jaxpr are not known yet. The value counts as read in
                # both dtypes, so that its producer gets no request.
                self._read(v, Use.LOW | Use.FULL, "")
        self._outside = {v: reads.fulls for v, reads in self._reads.items()}

    def _read(self, v: Atom, use: Use, consumer: str, fulls: int = 0) -> None:
        if (reads := self._reads.get(v)) is None:
            self._reads[v] = Uses(use, fulls, consumer)
            return
        if reads.use is not use:
            reads.use |= use
        reads.first = consumer
        reads.fulls += fulls

    def of(self, v: Atom) -> Uses:
        """Returns how consumers read a value."""
        return self._reads.get(v, UNUSED)

    def of_inputs(self) -> tuple[tuple[Use, ...], tuple[int, ...]]:
        """Returns the use of each input, and how many equations read it in float32, up to two."""
        found = [self.of(v) for v in self._inputs]
        return tuple([r.use for r in found]), tuple([min(r.fulls, 2) for r in found])

    def widened(self) -> frozenset[Any]:
        """Returns the outputs of the jaxpr that one of its equations also reads in float32."""
        return frozenset([v for v, n in self._outside.items() if self._reads[v].fulls > n])

    def add(
        self, eqn: JaxprEqn, plan: EquationPlan, granted: tuple[Request, ...] | None = None
    ) -> None:
        """Records how an equation reads its operands, once it follows the request ``granted``."""
        uses, fulls = self._reads_of(eqn, plan, granted)
        for v, use, count in zip(eqn.invars, uses, fulls, strict=True):
            if not isinstance(v, Literal):
                self._read(v, use, eqn.primitive.name, count)

    def _reads_of(
        self, eqn: JaxprEqn, plan: EquationPlan, granted: tuple[Request, ...] | None
    ) -> tuple[Sequence[Use], Sequence[int]]:
        """Returns the use of each operand, and how many equations read it in float32."""
        if plan.uses:
            return plan.uses, _fulls(eqn, plan)
        name, count = eqn.primitive.name, len(eqn.invars)
        passes_on = granted is None and name in _ROUNDS and _passes_on(plan)
        # A lowered contraction reads 16 bits, even if its result is its float32 accumulator.
        if name in _CONTRACTS and plan.reason.code in _LOW_CONTRACTION:
            use = _LOW
        # An equation with a request will run, and read its operands, in the requested dtype.
        elif granted is not None:
            use = next(request.use for request in granted if request.use)
        else:
            use = plan.computes_in
            if passes_on and use is _LOW:
                use = self._through(eqn)
        if use is _NONE:
            uses = self._either(eqn, plan)
            fulls = [int(use is _FULL) for use in uses]
        else:
            uses, fulls = [use] * count, [int(use is _FULL)] * count
        if passes_on:
            # A move counts as a float32 reader of its operand if an equation reads its result in
            # float32, but not if the jaxpr only returns the result. A sort never counts: it runs in
            # 16 bits, and no other consumer can share the cast of its result.
            read = name in _FUSES and any([self.of(v).fulls for v in eqn.outvars])
            fulls = [int(read)] * count
        return uses, fulls

    def _through(self, eqn: JaxprEqn) -> Use:
        """Returns how a move reads: if no consumer cares about its dtype, neither does the move."""
        through = _NONE
        for out in eqn.outvars:
            through |= self.of(out).use
        return through

    def _either(self, eqn: JaxprEqn, plan: EquationPlan) -> list[Use]:
        """Returns the use of each operand of an equation that accepts either dtype."""
        # If consumers rank an operand or round it to integers (SHARP, SNAP), the equation counts as
        # a float32 reader, so that the operand is not rounded when a product also reads it. An
        # operand that is already in 16 bits is not raised.
        return [
            Use.of(dtype) & Use.FULL
            if not isinstance(v, Literal) and self._needs.get(v, NOTHING) & _INDEXED
            else Use.NONE
            for v, dtype in zip(eqn.invars, plan.reads, strict=True)
        ]


def _fulls(eqn: JaxprEqn, plan: EquationPlan) -> list[int]:
    """Returns how many equations in the bodies of an equation read each operand in float32."""
    found: dict[int, int] = {}
    for body, inner in zip(bodies(eqn), plan.inner, strict=True) if plan.inner else ():
        for i, count in zip(body.operands, inner.fulls, strict=True):
            found[i] = found.get(i, 0) + count
    return [found.get(i, int(use is _FULL)) for i, use in enumerate(plan.uses)]


def _passes_on(plan: EquationPlan) -> bool:
    """Whether an equation that commutes with rounding has 16-bit results, and casts none."""
    is_float = any([state.dtype is not None for state in plan.results])
    return is_float and not any(plan.casts) and Use.of(plan.results[0].dtype) is not _FULL
