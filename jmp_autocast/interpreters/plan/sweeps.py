"""Sweeps forward and backward over one jaxpr, until there are no more requests.

Forward, each equation gets dtypes from its policy and its operands. Backward, the dtypes of the
consumers of each value become requests (`requests`), and requested equations are planned again. A
call is planned again in the backward sweep itself, as soon as the consumers of its results are
known, so that it requests the same of its operands as its inlined body would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..compat import Jaxpr, JaxprEqn, Literal, variables_in
from ..primitives.structure import STRUCTURES
from .consumers import Consumers
from .data import Context, EquationPlan, Request, ValueState, literal_state
from .mark_sweep import marks_of
from .needs import NOTHING, Need, needs_of
from .requests import find_requests
from .structural import Plans

# A call is planned again at most this often.
_MAX_REQUESTS = 4


class Sweeps:
    """The sweeps over one jaxpr.

    Args:
        jaxpr: The open jaxpr.
        path: The enclosing scopes.
        given: The state of each constant and input.
        requests: The request for each output.
        planner: Plans the equations.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        path: tuple[str, ...],
        given: Mapping[Any, ValueState],
        requests: Sequence[Request],
        planner: Plans,
    ) -> None:
        self._jaxpr, self._path, self._planner = jaxpr, path, planner
        self._output_requests = requests
        marks = [given[v].marks for v in jaxpr.invars]
        needed = [Need(request.needs) for request in requests]
        self._facts = marks_of(jaxpr, marks, planner.memo)
        self._needs = needs_of(jaxpr, needed, planner.memo, marks)
        self._states = dict(given)
        # The last context of each equation; `_equations` holds its last plan.
        self._contexts: list[Context] = []
        self._equations: list[EquationPlan] = []
        # The states of the results of each equation after the last forward sweep.
        self._results: list[tuple[ValueState, ...]] = []
        self._requests: dict[int, tuple[Request, ...]] = {}
        # All requests that each call has had, from the first to the last.
        self._call_requests: dict[int, list[tuple[Request, ...]]] = {}
        # The operands of each equation that other equations also read in float32.
        self._shared: dict[int, frozenset[int]] = {}
        # Calls whose results or shared operands have changed since the last forward sweep.
        self._moved: set[int] = set()

    def run(self) -> tuple[list[EquationPlan], Mapping[Any, ValueState], Consumers]:
        """Returns the plans, the states of all values, and the result of the last backward sweep.

        The loop ends: an equation gets at most one request, and a call at most four. Of 4,669 plans
        of 900 random programs, 15 took three sweeps.
        """
        # The first sweep has no requests: most programs need no other.
        self._forward()
        while True:
            found = find_requests(
                self._jaxpr,
                self._contexts,
                self._equations,
                self._states,
                self._output_requests,
                self._requests,
                self._replanned,
                self._needs,
            )
            for i, shared in found.shared.items():
                if shared != self._shared.get(i):
                    self._shared[i] = shared
                    self._moved.add(i)
            more = self._moved | found.requests.keys()
            if not more:
                return self._equations, self._states, found.consumers
            self._requests.update(found.requests)
            self._moved = set()
            self._forward(more)

    def _forward(self, more: Collection[int] = ()) -> None:
        """Plans the equations in program order, given the requests of the last sweep.

        The plan of an equation depends on its operands and its request: if neither has changed
        since the sweep before, the plan is kept.
        """
        is_first, equations = not self._contexts, []
        changed: set[Any] = set()  # values whose states have changed since the last sweep
        for i, eqn in enumerate(self._jaxpr.eqns):
            is_new = is_first or i in more
            if not is_new and (not changed or changed.isdisjoint(variables_in(eqn.invars))):
                equations.append(self._equations[i])
                continue
            context = self._context_of(i, eqn)
            plan = self._planner.plan_at(context)
            if is_first:
                self._contexts.append(context)
            else:
                self._contexts[i] = context
                if plan.results != self._results[i]:
                    changed.update(eqn.outvars)
            for v, state in zip(eqn.outvars, plan.results, strict=True):
                self._states[v] = state
            equations.append(plan)
        self._equations = equations
        self._results = [plan.results for plan in equations]

    def _context_of(self, i: int, eqn: JaxprEqn) -> Context:
        """Returns an equation in its context, with the facts about its operands."""
        planner = self._planner
        operands = [
            literal_state(v) if isinstance(v, Literal) else self._states[v] for v in eqn.invars
        ]
        requests, need = self._requests.get(i, ()), NOTHING
        marks, kind = self._facts.operands[i], self._facts.kinds[i]
        if eqn.primitive.name in STRUCTURES:
            # In the first sweep, the requests of a call say only which results lead to a product
            # (LEADS). The other results are float32 in its body from the start.
            of_each = [self._needs.get(v, NOTHING) & Need.LEADS for v in eqn.outvars]
            requests = requests or tuple([Request(needs=int(need)) for need in of_each])
            shared = self._shared.get(i, ())
            marked = zip(operands, marks, strict=True)
            operands = [
                dataclasses.replace(state, marks=m, is_widened=state.is_widened or k in shared)
                if m != state.marks or k in shared
                else state
                for k, (state, m) in enumerate(marked)
            ]
        elif eqn.outvars:
            need = self._needs.get(eqn.outvars[0], NOTHING)
        floats = [k for k, state in enumerate(operands) if state.dtype is not None]
        given = eqn, eqn.primitive.name, tuple(operands), floats
        force = planner.policy, planner.regions.at(self._path, eqn)
        return Context(*given, *force, requests, marks, need, kind)

    def _replanned(self, i: int, requested: tuple[Request, ...]) -> EquationPlan | None:
        """Plans a call again, for the requests for its results.

        Returns:
            The plan; None if the last plan was for these requests, or the call has reached its
            limit.
        """
        earlier = self._call_requests.setdefault(i, [])
        if len(earlier) >= _MAX_REQUESTS or (earlier and earlier[-1] == requested):
            return None
        earlier.append(requested)
        self._requests[i] = requested
        self._contexts[i] = self._contexts[i]._replace(requests=requested)
        plan = self._planner.plan_at(self._contexts[i])
        if plan.results != self._results[i]:
            self._moved.add(i)
        self._equations[i] = plan
        return plan
