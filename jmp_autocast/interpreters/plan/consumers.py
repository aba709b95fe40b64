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

    def _read(self, v: Atom, use: Use, consumer: str, fulls: int | None = None) -> None:
        reads = self._reads.setdefault(v, Uses())
        reads.use |= use
        reads.first = consumer
        if use is Use.FULL:
            fulls = (consumer != OUTPUT) if fulls is None else fulls
        reads.fulls += fulls or 0

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
        name = eqn.primitive.name
        uses = plan.uses or self._uses(eqn, plan, granted)
        fulls: dict[int, int] = {}
        for body, inner in zip(bodies(eqn), plan.inner, strict=True) if plan.inner else ():
            for i, count in zip(body.operands, inner.fulls, strict=True):
                fulls[i] = fulls.get(i, 0) + count
        if granted is None and not plan.uses and self._passes_on(eqn, plan):
            # A move counts as a float32 reader of its operand if an equation reads its result in
            # float32, but not if the jaxpr only returns the result. A sort never counts: it runs in
            # 16 bits, and no other consumer can share the cast of its result.
            read = name in _FUSES and any([self.of(v).fulls for v in eqn.outvars])
            fulls = dict.fromkeys(range(len(eqn.invars)), int(read))
        for i, (v, use) in enumerate(zip(eqn.invars, uses, strict=True)):
            if not isinstance(v, Literal):
                self._read(v, use, name, fulls=fulls.get(i))

    def _uses(
        self, eqn: JaxprEqn, plan: EquationPlan, granted: tuple[Request, ...] | None
    ) -> Sequence[Use]:
        """Returns in which dtype an equation reads each operand."""
        use = self._use(eqn, plan, granted)
        if use:
            return (use,) * len(eqn.invars)
        # This equation accepts either dtype. If consumers rank an operand or round it to integers
        # (SHARP, SNAP), the equation counts as a float32 reader, so that the operand is not rounded
        # when a product also reads it. An operand that is already in 16 bits is not raised.
        return [
            Use.of(dtype) & Use.FULL
            if not isinstance(v, Literal) and self._needs.get(v, NOTHING) & _INDEXED
            else Use.NONE
            for v, dtype in zip(eqn.invars, plan.reads, strict=True)
        ]

    def _use(self, eqn: JaxprEqn, plan: EquationPlan, granted: tuple[Request, ...] | None) -> Use:
        """Returns in which dtype an equation reads its operands, NONE if either will do."""
        name, code = eqn.primitive.name, plan.reason.code
        # A lowered contraction reads 16 bits, even if its result is its float32 accumulator.
        if name in _CONTRACTS and code in _LOW_CONTRACTION:
            return Use.LOW
        # An equation with a request will run, and read its operands, in the requested dtype.
        if granted is not None:
            return next(request.use for request in granted if request.use)
        if all([state.dtype is None for state in plan.results]):
            # An equation without float results, such as a comparison, accepts either dtype, unless
            # the policy keeps its dtypes.
            kept = code in (ReasonCode.KEEP, ReasonCode.UNKNOWN)
            return Use.FULL if kept else Use.NONE
        # An equation reads float32 if it is computed in float32, even if the result is rounded.
        if self._is_full(plan) or any(plan.casts) or self._reads_full(plan):
            return Use.FULL
        if not self._passes_on(eqn, plan):
            return Use.LOW
        # If no consumer of a move cares about its dtype, neither does the move.
        through = Use.NONE
        for out in eqn.outvars:
            through |= self.of(out).use
        return through

    def _passes_on(self, eqn: JaxprEqn, plan: EquationPlan) -> bool:
        """Returns whether an equation commutes with rounding: it accepts its consumers' dtype."""
        if eqn.primitive.name not in _ROUNDS or any(plan.casts):
            return False
        return any([s.dtype is not None for s in plan.results]) and not self._is_full(plan)

    def _is_full(self, plan: EquationPlan) -> bool:
        return Use.of(plan.results[0].dtype) is Use.FULL

    def _reads_full(self, plan: EquationPlan) -> bool:
        reads = [Use.of(dtype) for dtype in plan.reads if dtype is not None]
        return bool(reads) and all([use is Use.FULL for use in reads])
