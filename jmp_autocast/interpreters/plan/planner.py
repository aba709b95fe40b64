"""jaxpr and `Policy` to `Plan`: sweeps over the equations until no reader asks for more.

A sweep from the first equation to the last gives each equation the dtypes that its policy and its
operands say. A sweep from the last to the first finds the equations whose readers all read another
dtype than they return (`demands`); those are asked, and the forward sweep is made again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from ...policies import Policy, may_use_float8
from ...policies.registry import has_rule_functions
from ..compat import Literal, body_of, consts_of, variables_in
from ..primitives.called_back import functions_of
from ..primitives.picking import picks
from ..primitives.structure import STRUCTURES, has_rule
from .called_back import plan_called_back
from .constant_range import constant_range
from .data import EquationPlan, Plan, Source, ValueState, Want
from .equation import plan_equation
from .float_dtypes import float_dtype, is_in
from .islands import leaving, outside, returned
from .kinds import kind_of
from .last_products import last_products
from .marks import AllMarks, Memo, accumulates, marks_of, of
from .needs import NOTHING, Need, Needs, needs_of
from .number_factors import as_numbers, with_numbers_cast
from .picks import beside_pick, beside_picks
from .region import Place, Regions
from .requests import find_requests
from .rounded_streams import RoundedStreams
from .structural import plan_structural, planning_rule
from .value_facts import literal_state


@dataclasses.dataclass(slots=True)
class _Sweeps:
    """The sweeps over one jaxpr.

    Args:
        jaxpr: The open jaxpr.
        path: The enclosing scopes.
        marks: How each value is made.
        needs: What each value is needed for.
        states: What is known of each value.
        places: Each equation where it stands, as it was planned last.
        equations: The plan of each equation.
        results: What the last forward sweep found of the results of each.
        requests: What is asked of the equations that are asked.
        told: For a call, what was asked of it each time.
        shared: For an equation that holds jaxprs, the operands that others read in float32, too.
        moved: The calls whose results differ from those of the last forward sweep.
    """

    jaxpr: Any
    path: tuple[str, ...]
    marks: AllMarks
    needs: Needs
    states: dict[Any, ValueState]
    places: list[Place] = dataclasses.field(default_factory=list)
    equations: list[EquationPlan] = dataclasses.field(default_factory=list)
    results: list[tuple[ValueState, ...]] = dataclasses.field(default_factory=list)
    requests: dict[int, tuple[Want, ...]] = dataclasses.field(default_factory=dict)
    told: dict[int, list[tuple[Want, ...]]] = dataclasses.field(default_factory=dict)
    shared: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    moved: set[int] = dataclasses.field(default_factory=set)


class Planner:
    """Plans a program: one instance per trace.

    Args:
        policy: The policy of the program.
        all_paths: Each plan knows its full path of scopes, also where the policy looks at none.
            A layer that stands at 96 paths is then planned 96 times.
        lowers_nothing: Why nothing is lowered but in scopes that name a 16-bit dtype, ``""`` where
            the compute dtype of the policy holds.
    """

    def __init__(
        self,
        policy: Policy,
        all_paths: bool = False,
        lowers_nothing: str = "",
    ) -> None:
        self.policy = policy
        self._wide = policy.wide_dtype
        self._plans: dict[Any, tuple[Any, Plan]] = {}
        self._kinds: dict[tuple[Any, ...], Plan] = {}
        self._equations: dict[tuple[Any, ...], EquationPlan] = {}
        self._reached: Memo = {}
        # At level "tensor_cores" nothing but contractions rounds.
        rounds = policy.level != "tensor_cores"
        self._streams = RoundedStreams(policy) if rounds else None
        # Whether a function with a derivative or batching rule of the user's own was planned.
        self.has_rules: bool = False
        self._last: frozenset[int] = frozenset()
        self._beside_picks: frozenset[int] = frozenset()
        scoped = [(name, rule) for _, name, rule in policy.scoped_rules]
        self._rule_functions = has_rule_functions([*policy.rules, *scoped])
        looks_at_names = policy.scopes or policy.scoped_rules or self._rule_functions
        looks_at_names = looks_at_names or policy.precisions
        self.regions: Regions = Regions(policy, not (looks_at_names or all_paths), lowers_nothing)

    @property
    def scopes(self) -> list[tuple[str, ...]]:
        """The scopes of what was planned, as far as the policy looks at them."""
        return self.regions.scopes

    def plan_program(self, jaxpr: Any, inputs: Sequence[ValueState], wants: Sequence[Want]) -> Plan:
        """Plans a whole program: its caller gets each output in the dtype it is returned in.

        Args:
            jaxpr: The closed jaxpr.
            inputs: What is known of each input.
            wants: What is asked of each output.

        Returns:
            The plan.
        """
        if may_use_float8(self.policy):
            self._last = last_products(jaxpr)
        self._beside_picks = beside_picks(jaxpr)
        plan = self.plan(jaxpr, inputs, wants)
        wants = [
            returned(want, state, v, self._wide)
            for want, state, v in zip(wants, plan.outputs, body_of(jaxpr).outvars, strict=True)
        ]
        return self.plan(jaxpr, inputs, wants)

    def plan(
        self,
        jaxpr: Any,
        inputs: Sequence[ValueState],
        wants: Sequence[Want],
        path: tuple[str, ...] = (),
    ) -> Plan:
        """Plans a jaxpr; equal questions about one jaxpr get the same plan object.

        Args:
            jaxpr: An open or closed jaxpr.
            inputs: What is known of each input.
            wants: What is asked of each output.
            path: The enclosing scopes.

        Returns:
            The plan.
        """
        # JAX gives the layers of a model one jaxpr when their types agree; so do we with its plan,
        # as long as what is known of the inputs, and asked of the outputs, agrees too.
        question = tuple(inputs), tuple(wants), path
        key = (id(jaxpr), *question)
        planned = self._plans.get(key)
        if planned is None:
            # The scopes are part of the question only as far as the policy looks at them:
            # `Regions`. The jaxpr is kept alive with its plan, or another could get its id.
            planned = self._plans[key] = (jaxpr, self._plan_of_kind(jaxpr, *question))
        return planned[1]

    def _plan_of_kind(self, jaxpr: Any, *question: Any) -> Plan:
        """Plans a jaxpr, unless one of its kind was planned; each has a plan of its own."""
        # A rule function may look at the source line; a last product, and what stands before a
        # pick, is one equation.
        is_alone = self._rule_functions or self._last
        is_alone = is_alone or not self._beside_picks.isdisjoint(map(id, body_of(jaxpr).eqns))
        kind = None if is_alone else kind_of(jaxpr)
        if kind is None:
            return self._plan(jaxpr, *question)
        key = (kind, *question)
        twin = self._kinds.get(key)
        if twin is None:
            twin = self._kinds[key] = self._plan(jaxpr, *question)
        return dataclasses.replace(twin, jaxpr=body_of(jaxpr))

    def _plan(
        self,
        jaxpr: Any,
        inputs: Sequence[ValueState],
        wants: Sequence[Want],
        path: tuple[str, ...],
    ) -> Plan:
        body = body_of(jaxpr)
        consts = tuple(map(self._const_state, body.constvars, consts_of(jaxpr)))
        given = dict(zip(body.constvars, consts, strict=True))
        given.update(zip(body.invars, inputs, strict=True))
        made = [state.marks for state in inputs]
        marks = marks_of(body, made, self._reached)
        needs = needs_of(body, [Need(want.needs) for want in wants], self._reached, made)
        sweeps = _Sweeps(body, path, marks, needs, dict(given))
        # Without requests at first: most programs need one sweep.
        self._sweep(sweeps)
        # This ends: a sweep asks only equations that were not asked before, and each call four
        # times at most. Of 4,669 plans of 900 random programs 15 took three sweeps.
        while True:
            found = find_requests(
                body,
                sweeps.equations,
                sweeps.states,
                wants,
                sweeps.requests,
                lambda i, asked: self._replanned(sweeps, i, asked),
                self.policy,
                needs,
                marks,
            )
            for i, shared in found.shared.items():
                if shared != sweeps.shared.get(i):
                    sweeps.shared[i] = shared
                    sweeps.moved.add(i)
            more = sweeps.moved | found.requests.keys()
            if not more:
                break
            sweeps.requests.update(found.requests)
            sweeps.moved = set()
            self._sweep(sweeps, more)
        equations, states = sweeps.equations, sweeps.states
        outputs, output_dtypes = [], []
        for v, want in zip(body.outvars, wants, strict=True):
            state = literal_state(v, self._wide) if isinstance(v, Literal) else states[v]
            unchanged = want.dtype is None or is_in(state.dtype, None, want.dtype)
            cast = None if unchanged else want.dtype
            output_dtypes.append(cast)
            outputs.append(ValueState(cast) if cast is not None else state)
        # A body in which nothing changes keeps its own jaxpr, so that JAX finds its caches by
        # identity.
        identity = (
            all(equation.unchanged for equation in equations)
            and not any(output_dtypes)
            # What is no float may be no array either, and have no dtype.
            and all(s.dtype is None or s.dtype == v.aval.dtype for v, s in given.items())
        )
        return Plan(
            body,
            consts,
            tuple(inputs),
            tuple(equations),
            tuple(outputs),
            tuple(output_dtypes),
            found.demands,
            found.fulls,
            identity,
            path,
            self._wide,
        )

    def _sweep(self, at: _Sweeps, more: Collection[int] = ()) -> None:
        """Plans the equations in program order, given what the readers of some ask for.

        The plan of an equation follows from its operands and from what is asked of it: where
        neither differs from the sweep before, the plan is that one.
        """
        before, equations = at.equations, []
        changed: set[Any] = set()  # of which something else was known in the sweep before
        for i, eqn in enumerate(at.jaxpr.eqns):
            is_new = not before or i in more
            if is_new or (changed and not changed.isdisjoint(variables_in(eqn.invars))):
                place = self._place(at, i, eqn)
                plan = self._planned(at, place)
                if not before:
                    at.places.append(place)
                else:
                    at.places[i] = place
                    if plan.results != at.results[i]:
                        changed.update(eqn.outvars)
                at.states.update(zip(eqn.outvars, plan.results, strict=True))
            else:
                plan = before[i]
            equations.append(plan)
        at.equations = equations
        at.results = [plan.results for plan in equations]

    def _place(self, at: _Sweeps, i: int, eqn: Any) -> Place:
        """Returns an equation where it stands, with all that is known of its operands."""
        operands = [
            literal_state(v, self._wide) if isinstance(v, Literal) else at.states[v]
            for v in eqn.invars
        ]
        wants, accumulating = at.requests.get(i, ()), False
        if eqn.primitive.name in STRUCTURES:
            shared = at.shared.get(i, ())
            operands = [
                dataclasses.replace(state, marks=m, is_widened=state.is_widened or k in shared)
                if m != state.marks or k in shared
                else state
                for k, (state, m) in enumerate(zip(operands, of(at.marks, eqn.invars), strict=True))
            ]
            # What readers need is known before it is known how they read.
            wants = wants or tuple([Want(needs=at.needs.get(v, 0)) for v in eqn.outvars])
        elif eqn.outvars:
            need = at.needs.get(eqn.outvars[0], NOTHING)
            accumulating = accumulates(eqn, at.marks, bool(need & Need.ADDED))
        is_at_pick = id(eqn) in self._beside_picks or picks(eqn)
        return Place(
            eqn,
            tuple(operands),
            self.regions.at(at.path, eqn),
            wants,
            id(eqn) in self._last,
            is_at_pick,
            accumulating,
        )

    def _planned(self, at: _Sweeps, place: Place) -> EquationPlan:
        return self._followed(place, self._plan_equation(place), at.needs, at.marks)

    def _replanned(self, at: _Sweeps, i: int, asked: tuple[Want, ...]) -> EquationPlan | None:
        """Plans a call anew as soon as it is known how its results are read, as if inline.

        Returns:
            The plan; None where the call was planned for these readers, or was asked four times.
        """
        told = at.told.setdefault(i, [])
        if len(told) > 3 or (told and told[-1] == asked):
            return None
        told.append(asked)
        at.requests[i] = asked
        at.places[i] = at.places[i]._replace(wants=asked)
        plan = self._planned(at, at.places[i])
        if plan.results != at.results[i]:
            at.moved.add(i)
        at.equations[i] = plan
        return plan

    def _followed(
        self, at: Place, plan: EquationPlan, needs: Needs, marks: AllMarks
    ) -> EquationPlan:
        """Returns a plan with what follows from where its equation stands among the others."""
        dtype = at.region.compute_dtype
        if at.is_at_pick:
            plan = beside_pick(at, plan)
        if self._streams is not None and dtype is not None:
            plan = self._streams.follow(needs, marks, at.eqn, plan, dtype)
        return plan

    def _plan_equation(self, at: Place) -> EquationPlan:
        if (beyond := outside(at)) is not at:
            return leaving(self._plan_equation(beyond), at.given)
        if (cast := with_numbers_cast(at)) is not at:
            return as_numbers(at, self._plan_equation(cast), plan_equation(self.policy, at))
        rule = planning_rule(at.name)
        if at.region.island is not None and functions_of(at.eqn):
            rule = plan_called_back
        if rule is not None:
            self.has_rules |= has_rule(at.eqn)
            return plan_structural(rule, self, at)
        # A rule function may look at the source line, and a range costs a pass over its array.
        has_range = any([state.const_range is not None for state in at.given])
        if at.wants or self._rule_functions or has_range:
            return plan_equation(self.policy, at)
        return self._shared_plan(at)

    def _shared_plan(self, at: Place) -> EquationPlan:
        """Plans an equation of which nothing is asked; those that look alike share one plan.

        A program of many equations has few kinds of them. With a plan each, planning took time that
        grew faster than the program: Python's garbage collector visited the plans again and again.
        """
        eqn, region = at.eqn, at.region
        # The types of the results follow from the rest: JAX caches them so, too.
        signature = (
            eqn.primitive,
            region.compute_dtype,
            region.cause,
            region.rules,
            region.precision,
            region.float8,
            region.island,
            at.is_last,
            at.accumulates,
            *at.given,
            *[v.aval for v in eqn.invars],
            *eqn.params,
            *eqn.params.values(),
        )
        try:
            plan = self._equations.get(signature)
        except TypeError:  # a parameter without a hash
            return plan_equation(self.policy, at)
        if plan is None:
            # The states of the operands are part of the signature: the plan holds them, and may be
            # shared.
            plan = self._equations[signature] = plan_equation(self.policy, at)
        return plan

    def _const_state(self, var: Any, value: Any) -> ValueState:
        dtype = float_dtype(var.aval, self._wide)
        if dtype is None:
            return ValueState(None)
        return ValueState(dtype, Source.CONST, const_range=constant_range(value, self._wide))
