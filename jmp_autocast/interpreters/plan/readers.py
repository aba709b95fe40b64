"""How each value of a jaxpr is read: one record per value, filled from the last equation on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..compat import Atom, Jaxpr, JaxprEqn, Literal
from ..primitives.structure import bodies
from ..primitives.traits import having
from .data import Demand, EquationPlan, Want
from .needs import NOTHING, Need, Needs
from .reasons import ReasonCode

_CONTRACTS = having("contracts")
_FUSES = having("fuses")
_ROUNDS = having("rounds")
_INDEXED = Need.SHARP | Need.SNAP
_LOW_CONTRACTION = (ReasonCode.LOWER_PRECISION, ReasonCode.DOT_OUT)
OUTPUT = "the output"


@dataclasses.dataclass(slots=True)
class Reads:
    """How a value is read.

    Args:
        demand: In which dtypes.
        fulls: How many equations read it in float32, or move it for those that do.
        first: The primitive that reads it first, in program order.
    """

    demand: Demand = Demand.NONE
    fulls: int = 0
    first: str = ""

    def as_want(self, needs: int) -> Want:
        """Returns the request of these consumers to the producer of the value."""
        fulls = min(self.fulls, 2)
        return Want(None, self.demand, needs, fulls, self.first, is_known=True)


NOBODY = Reads()


class Readers:
    """How the equations seen so far read each value, from the last to the first.

    Args:
        jaxpr: The open jaxpr.
        wants: The request for each output.
        needs: The needs of each value.
    """

    def __init__(self, jaxpr: Jaxpr, wants: Sequence[Want], needs: Needs) -> None:
        self._needs = needs
        self._inputs = jaxpr.invars
        self._reads: dict[Any, Reads] = {}
        for v, want in zip(jaxpr.outvars, wants, strict=True):
            if isinstance(v, Literal):
                continue
            if want.dtype is not None:
                self._read(v, Demand.of(want.dtype), OUTPUT)
            elif want.is_known or want.demand:
                self._read(v, want.demand, want.reader, want.fulls)
            else:
                # Outer consumers are not known yet: leave the dtype of `v` alone.
                self._read(v, Demand.LOW | Demand.FULL, "")
        self._outside = {v: reads.fulls for v, reads in self._reads.items()}

    def _read(self, v: Atom, demand: Demand, reader: str, fulls: int | None = None) -> None:
        reads = self._reads.setdefault(v, Reads())
        reads.demand |= demand
        reads.first = reader
        if demand is Demand.FULL:
            fulls = (reader != OUTPUT) if fulls is None else fulls
        reads.fulls += fulls or 0

    def of(self, v: Atom) -> Reads:
        """Returns how a value is read."""
        return self._reads.get(v, NOBODY)

    def of_inputs(self) -> tuple[tuple[Demand, ...], tuple[int, ...]]:
        """Returns how each input is read, and by how many in float32, counted up to two."""
        found = [self.of(v) for v in self._inputs]
        return tuple([r.demand for r in found]), tuple([min(r.fulls, 2) for r in found])

    def widened(self) -> frozenset[Any]:
        """Returns the outputs that an equation reads in float32, besides consumers outside."""
        return frozenset([v for v, n in self._outside.items() if self._reads[v].fulls > n])

    def add(
        self, eqn: JaxprEqn, plan: EquationPlan, request: tuple[Want, ...] | None = None
    ) -> None:
        """Records the dtypes of the operands of an equation that follows its request."""
        name = eqn.primitive.name
        demands = plan.demands or self._demands(eqn, plan, request)
        fulls: dict[int, int] = {}
        for body, inner in zip(bodies(eqn), plan.inner, strict=True) if plan.inner else ():
            for i, count in zip(body.operands, inner.fulls, strict=True):
                fulls[i] = fulls.get(i, 0) + count
        if request is None and not plan.demands and self._passes_on(eqn, plan):
            # A mere float32 output has no consumer, and neither does its source before a move. No
            # other consumer shares the cast of a value that is sorted in 16 bits.
            read = name in _FUSES and any([self.of(v).fulls for v in eqn.outvars])
            fulls = dict.fromkeys(range(len(eqn.invars)), int(read))
        for i, (v, demand) in enumerate(zip(eqn.invars, demands, strict=True)):
            if not isinstance(v, Literal):
                self._read(v, demand, name, fulls=fulls.get(i))

    def _demands(
        self, eqn: JaxprEqn, plan: EquationPlan, request: tuple[Want, ...] | None
    ) -> Sequence[Demand]:
        """Returns in which dtype an equation reads each operand."""
        demand = self._demand(eqn, plan, request)
        if demand:
            return (demand,) * len(eqn.invars)
        # If consumers rank a value or make integers of it (SHARP, SNAP), each float32 read of it
        # counts: a call whose body also holds a product would otherwise get the product's 16-bit
        # copy as its operand. A value that is 16-bit already is not raised.
        return [
            Demand.of(dtype) & Demand.FULL
            if not isinstance(v, Literal) and self._needs.get(v, NOTHING) & _INDEXED
            else Demand.NONE
            for v, dtype in zip(eqn.invars, plan.reads, strict=True)
        ]

    def _demand(
        self, eqn: JaxprEqn, plan: EquationPlan, request: tuple[Want, ...] | None
    ) -> Demand:
        """Returns in which dtype an equation reads its operands; NONE where either will do."""
        name, code = eqn.primitive.name, plan.reason.code
        # A contraction with a float32 accumulator as its result reads 16 bits, too.
        if name in _CONTRACTS and code in _LOW_CONTRACTION:
            return Demand.LOW
        # An equation with a request will run, and read its operands, in the requested dtype.
        if request is not None:
            return next(want.demand for want in request if want.demand)
        if all([state.dtype is None for state in plan.results]):
            # A comparison or an index: exact enough in either dtype, unless it ranks.
            kept = code in (ReasonCode.KEEP, ReasonCode.UNKNOWN)
            return Demand.FULL if kept else Demand.NONE
        # An equation that is computed in float32 and rounded once, here or by the program, reads
        # float32.
        if self._is_full(plan) or any(plan.casts) or self._reads_full(plan):
            return Demand.FULL
        if not self._passes_on(eqn, plan):
            return Demand.LOW
        # If no consumer of a move cares about its dtype, neither does the move.
        through = Demand.NONE
        for out in eqn.outvars:
            through |= self.of(out).demand
        return through

    def _passes_on(self, eqn: JaxprEqn, plan: EquationPlan) -> bool:
        """Returns whether rounding commutes with an equation: its consumers count as direct."""
        if eqn.primitive.name not in _ROUNDS or any(plan.casts):
            return False
        return any([s.dtype is not None for s in plan.results]) and not self._is_full(plan)

    def _is_full(self, plan: EquationPlan) -> bool:
        return Demand.of(plan.results[0].dtype) is Demand.FULL

    def _reads_full(self, plan: EquationPlan) -> bool:
        reads = [Demand.of(dtype) for dtype in plan.reads if dtype is not None]
        return bool(reads) and all([demand is Demand.FULL for demand in reads])
