"""The sweep from the last equation to the first: what the readers of a value ask of its maker.

Example: ``exp(x - max(x))`` in float32 reads a difference. The difference of two 16-bit values
would be computed in 16 bits, and its error multiplies the result of ``exp``; so the difference is
asked for in float32, which costs a cast that XLA fuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...policies import Policy
from ..compat import Literal, variables_in
from ..primitives.picking import picks
from ..primitives.traits import having
from .data import Contract, Demand, EquationPlan, ValueState, Want
from .float_dtypes import is_narrower
from .kept_residuals import is_gated_summand, is_residual_sum, shrinks
from .marks import AllMarks, is_convolved_sum
from .needs import GUARDED, HARMED, LOST, NOTHING, Need, Needs
from .reasons import ReasonCode
from .united_reads import find_united

_CONTRACTS = having("contracts")
_CLEARS = having("clears")
_FEEDS = having("feeds")
_MOVES = having("moves")
_ROUNDS = having("rounds")
_SATURATES = having("saturates")

_OUTPUT = "the output"
_SUMS = having("sums") | {_OUTPUT}

_LOW_CONTRACTION = (ReasonCode.LOWER_PRECISION, ReasonCode.DOT_OUT)
_NO_WISH = Want()


def find_requests(
    jaxpr: Any,
    equations: Sequence[EquationPlan],
    states: Mapping[Any, ValueState],
    wants: Sequence[Want],
    already: Mapping[int, tuple[Want, ...]],
    policy: Policy,
    needs: Needs,
    marks: AllMarks,
) -> tuple[dict[int, tuple[Want, ...]], tuple[Demand, ...]]:
    """Finds the equations that should run in the dtype in which all their readers read.

    Args:
        jaxpr: The open jaxpr.
        equations: The plan of each equation.
        states: What is known of each value.
        wants: What is asked of each output.
        already: What an earlier sweep found: no equation is asked twice.
        policy: Where the program's inputs have no vote, a sum of two values stays in 16 bits, or
            the last norm of a network would raise the whole residual stream before it. It also
            says whether a contraction may hand out its accumulator.
        needs: What each value is needed for.
        marks: How each value is made.

    Returns:
        For the index of an equation, what is asked of each of its results; and how the equations,
        if they follow, read each input of the jaxpr.
    """
    requests = {}
    readers = _Readers(jaxpr, wants, needs, policy.wide_dtype)
    pairs = zip(jaxpr.eqns, equations, strict=True)
    for i, (eqn, plan) in reversed(list(enumerate(pairs))):
        request, adds, name = None, False, eqn.primitive.name
        if i not in already:
            request = readers.request(eqn, plan)
            # At level "compute" no source raises what it is added to, as with `dtype=` by hand.
            adds = name in _SUMS and not policy.data_abstains
            adds = adds and _adds_a_source(eqn, plan, states)
            # The digits that a difference loses are those of its logarithm, whoever else reads it:
            # `slogdet` of [[300, 1], [2, 300]] is 11.4, and infinite in float16 without this. So
            # are those of a tanh whose `log(1 - y * y)` a loss reads, and the next layer `y`: the
            # loss was 22 % off in bfloat16.
            loses = name == "sub" and bool(needs.get(eqn.outvars[0], NOTHING) & Need.POLE)
            loses |= name in _SATURATES and bool(needs.get(eqn.outvars[0], NOTHING) & LOST)
            if request is None and (adds or loses):
                request = readers.mixed_request(eqn)
        if request is not None:
            computed = {v for v in variables_in(eqn.invars) if states[v].is_computed}
            # At level "compute" a residual stream is 16 bits by intent, as with `dtype=` by hand.
            # One that is computed in float32 needs no rounding where all its readers are, too.
            if policy.data_abstains:
                stays = is_residual_sum(eqn, states) and not plan.casts
            else:
                # A norm that reads the stream of a convolutional network is no reason to keep it in
                # float32.
                raises = all(want.demand is not Demand.LOW for want in request)
                stays = raises and is_convolved_sum(eqn, marks)
                stays = stays and not needs.get(eqn.outvars[0], NOTHING) & HARMED
            # Raised, `sigmoid(a) * b` would keep both factors in float32 for the backward pass.
            if len(computed) > 1:
                stays |= is_gated_summand(eqn, plan) and readers.only_sum(eqn.outvars[0])
                # A determinant adds up products to take others from them: the digits cancel. In
                # float16, products of three numbers up to 324 made 8 of 8 determinants NaN or inf.
                stays = stays and not readers.is_cancelled(eqn.outvars[0])
            # For the index alone, beside 16-bit readers, no two activations are kept in float32.
            if readers.only_snapped(eqn.outvars[0]):
                cheap = plan.inner or name in _FEEDS
                stays |= len(computed) > 1 or not cheap
            if not stays and _can_follow(policy, eqn, plan, request, needs, len(computed)):
                requests[i] = request
        readers.add(eqn, plan, requests.get(i))
    asked = {**already, **requests}
    requests |= find_united(jaxpr, equations, states, wants, asked, readers, policy.wide_dtype)
    return requests, readers.of_inputs()


class _Readers:
    """How each value is read by the equations seen so far, from the last to the first.

    Args:
        jaxpr: The open jaxpr.
        wants: What is asked of each output.
        needs: What each value is needed for.
        wide: The wide dtype of the policy: float32, or float64 where this speaks of float32.
    """

    def __init__(
        self,
        jaxpr: Any,
        wants: Sequence[Want],
        needs: Needs,
        wide: np.dtype,
    ) -> None:
        self._wide = wide
        self._needs = needs
        self._inputs = jaxpr.invars
        self._first_full: dict[Any, str] = {}  # the primitive that reads it first in float32
        self._demands: dict[Any, Demand] = {}
        self._counts: dict[Any, int] = {}  # how many read it in float32
        self._first: dict[Any, str] = {}  # the primitive that reads it first, in program order
        for v, want in zip(jaxpr.outvars, wants, strict=True):
            if isinstance(v, Literal):
                continue
            if want.dtype is not None:
                self._read(v, Demand.of(want.dtype, wide), _OUTPUT)
            elif want.demand:
                self._read(v, want.demand, want.reader)
            else:
                # Whoever reads it outside is not known here: no reason to change it.
                self._read(v, Demand.LOW | Demand.FULL, "")

    def _read(self, v: Any, demand: Demand, reader: str) -> None:
        before = self._demands.get(v)
        if before is not demand:  # an `|` of flags is slow
            self._demands[v] = demand if before is None else before | demand
        self._first[v] = reader
        if demand is Demand.FULL:
            self._first_full[v] = reader
            self._counts[v] = self._counts.get(v, 0) + (reader != _OUTPUT)

    def is_full(self, v: Any) -> bool:
        """Returns whether all that read a value read it in float32, or move it for such readers."""
        return self._demands.get(v) is Demand.FULL

    def count_full(self, v: Any) -> int:
        """Returns how many equations do, the caller not counted."""
        return self._counts.get(v, 0)

    def first(self, v: Any) -> str:
        """Returns the primitive that reads a value first."""
        return self._first[v]

    def only_sum(self, v: Any) -> bool:
        """Returns whether only sums, or the caller, read a value."""
        return not self._need(v) & Need.BEYOND_SUMS

    def is_cancelled(self, v: Any) -> bool:
        """Returns whether a value is a term of a sum from which a product is subtracted."""
        return bool(self._need(v) & Need.CANCELS)

    def _need(self, v: Any) -> Need:
        return self._needs.get(v, NOTHING)

    def of_inputs(self) -> tuple[Demand, ...]:
        """Returns how each input is read."""
        return tuple(self._demands.get(v, Demand.NONE) for v in self._inputs)

    def request(self, eqn: Any, plan: EquationPlan) -> tuple[Want, ...] | None:
        """Returns what to ask of an equation's results, None if they are as their readers want."""
        asked = [self._wish(v, state) for v, state in zip(eqn.outvars, plan.results, strict=True)]
        return None if all([want is _NO_WISH for want in asked]) else tuple(asked)

    def _wish(self, v: Any, state: ValueState) -> Want:
        if state.dtype is None or state.source is not None:
            return _NO_WISH
        demand = self._demands.get(v)
        need = self._need(v)
        if need & Need.SNAP and is_narrower(state.dtype, self._wide):
            return Want(demand=Demand.FULL, needs=need, reader="what rounds it to an integer")
        if need & Need.NEIGHBOR and is_narrower(state.dtype, self._wide):
            return Want(demand=Demand.FULL, needs=need, reader="a product of its elements")
        if demand not in (Demand.LOW, Demand.FULL) or demand is Demand.of(state.dtype, self._wide):
            return _NO_WISH
        return Want(demand=demand, needs=need, reader=self._first[v])

    def mixed_request(self, eqn: Any) -> tuple[Want, ...] | None:
        """Returns the request for a float32 result of which not all readers are float32."""
        (v,) = eqn.outvars
        if v not in self._first_full or self._demands[v] is Demand.FULL:
            return None
        return (Want(demand=Demand.FULL, reader=self._first_full[v]),)

    def only_snapped(self, v: Any) -> bool:
        """Returns whether a value is asked for in float32 only because it becomes an integer."""
        return bool(self._need(v) & Need.SNAP) and self._demands.get(v) is not Demand.FULL

    def add(self, eqn: Any, plan: EquationPlan, request: tuple[Want, ...] | None = None) -> None:
        """Adds how an equation reads its operands, if it follows the request."""
        name = eqn.primitive.name
        demands = plan.demands or (self._demand(eqn, plan, request),) * len(eqn.invars)
        for v, demand in zip(eqn.invars, demands, strict=True):
            if not isinstance(v, Literal):
                self._read(v, demand, name)

    def _demand(self, eqn: Any, plan: EquationPlan, request: tuple[Want, ...] | None) -> Demand:
        """Returns in which dtype an equation reads its operands."""
        name, code = eqn.primitive.name, plan.reason.code
        # A contraction reads 16 bits also where it returns its float32 accumulator.
        if name in _CONTRACTS and code in _LOW_CONTRACTION:
            return Demand.LOW
        # It will run in the dtype that is asked of it, and read its operands in that dtype.
        if request is not None:
            return next(want.demand for want in request if want.demand)
        if all([state.dtype is None for state in plan.results]):
            # A comparison or an index: exact enough in either dtype.
            kept = code in (ReasonCode.KEEP, ReasonCode.UNKNOWN)
            return Demand.FULL if kept else Demand.NONE
        if Demand.of(plan.results[0].dtype, self._wide) is Demand.FULL:
            return Demand.FULL
        if name not in _ROUNDS:
            return Demand.LOW
        # Rounding commutes with it, so a reader behind it is as good as a direct one.
        through = Demand.NONE
        for out in eqn.outvars:
            through |= self._demands.get(out, Demand.NONE)
        return through or Demand.LOW


def _can_follow(
    policy: Policy,
    eqn: Any,
    plan: EquationPlan,
    request: tuple[Want, ...],
    needs: Needs,
    computed: int,
) -> bool:
    """Returns whether an equation may run in the dtype that its readers ask for.

    Args:
        policy: Whether a contraction may hand out its accumulator as its result.
        eqn: The equation.
        plan: Its plan so far.
        request: What is asked of each result.
        needs: What each value is needed for.
        computed: The number of operands that are computed.
    """
    # A call decides inside what it can follow, equation by equation.
    if plan.inner:
        return True
    name, code = eqn.primitive.name, plan.reason.code
    if any(want.demand is Demand.LOW for want in request):
        # Of two computed operands each would need a cast, where the result needs one; a row of a
        # buffer is smaller than the buffer.
        clears = name in _CLEARS and not (name in _MOVES and shrinks(eqn))
        return code is ReasonCode.PROMOTE_FULL and clears and computed == 1
    if isinstance(plan.action, Contract):
        return policy.dot_output == "consumer" and code is ReasonCode.LOWER_PRECISION
    # Only what was 16 bits by vote is raised, never what a rule, a scope or the user made so; and
    # only what is cheap: a float32 `sin` for a float32 reader costs more than a cast.
    saturates = name in _SATURATES and bool(needs.get(eqn.outvars[0], NOTHING) & GUARDED)
    return code is ReasonCode.PROMOTE_LOW and (name in _FEEDS or saturates or picks(eqn))


def _adds_a_source(eqn: Any, plan: EquationPlan, states: Mapping[Any, ValueState]) -> bool:
    """Returns whether a sum adds a source in 16 bits that is no bias of a contraction.

    It may be larger than what it is added to. With one float32 reader the sum is computed in
    float32 once, and cast for those who read it in 16 bits.

    Args:
        eqn: The equation of the sum.
        plan: Its plan so far.
        states: What is known of each value.
    """
    if plan.reason.code is not ReasonCode.PROMOTE_LOW or plan.results[0].freshness == 2:
        return False
    found = [states[v] for v in variables_in(eqn.invars)]
    return any(s.source and s.known_value is None and not s.may_be_rounded for s in found)
