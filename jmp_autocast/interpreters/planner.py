"""jaxpr + Policy -> `Plan`: two-sided colouring, sweep by sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..policies import Policy, Rule
from ..policies.registry import has_rule_functions
from ..scopes import GOVERNED, read_mark
from .backward import find_requests, input_demands, leaf_copies
from .compat import Literal, body_of, consts_of, scope_names
from .extent import const_extent
from .forward import plan_equation
from .plan import EquationPlan, Leaf, Plan, ValueState, Wanted, float_dtype
from .plan_structural import STRUCTURAL_RULES
from .returned import with_returned


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The precision in force where an equation stands.

    Args:
        low: The compute dtype, None where nothing is lowered.
        governed: An inner autocast has already dealt with the region.
        cause: The scope that says so.
        names: The enclosing scopes, as far as the policy looks at them.
        rules: The rules that the scopes add, as pairs of primitive and rule.
    """

    low: np.dtype | None
    governed: bool
    cause: str
    names: tuple[str, ...]
    rules: tuple[tuple[str, Rule], ...] = ()


class Planner:
    """Plans a program: one instance per trace.

    Args:
        policy: The policy of the program.
        computed: The caller asks for the computed dtypes.
    """

    def __init__(self, policy: Policy, computed: bool = False) -> None:
        self.policy = policy
        # At level "tensor_cores" float32 is what was asked for, not what a list says.
        self._finds_returned = computed and policy.level != "tensor_cores"
        self.unknown: dict[str, None] = {}
        self._plans: dict[Any, tuple[Any, Plan]] = {}
        self._regions: dict[tuple[tuple[str, ...], tuple[str, ...]], Region] = {}
        self._equations: dict[tuple[Any, ...], EquationPlan] = {}
        scoped = [(name, rule) for _, name, rule in policy.scoped_rules]
        self._rule_functions = has_rule_functions([*policy.rules, *scoped])
        # Only marks matter then, and a layer at 96 paths is planned once.
        self._marks_only = not (policy.scopes or policy.scoped_rules or self._rule_functions)

    def note_unknown(self, name: str) -> None:
        """Records a primitive that no rule covers."""
        self.unknown.setdefault(name)

    def region(self, path: tuple[str, ...], names: tuple[str, ...]) -> Region:
        """Returns the precision of a region: the innermost scope that has one decides.

        Args:
            path: The scopes around a jaxpr, as far as the policy looks at them.
            names: The scopes in it.
        """
        region = self._regions.get((path, names))
        if region is None:
            seen = names
            if self._marks_only:
                seen = tuple(name for name in names if read_mark(name) is not None)
            region = self._regions[path, names] = self._find_region(path + seen)
        return region

    def _find_region(self, names: tuple[str, ...]) -> Region:
        marks = [(i + 1, mark) for i, name in enumerate(names) if (mark := read_mark(name))]
        if any(mark == GOVERNED for _, mark in marks):
            return Region(None, True, "an inner autocast governs the region", names)
        hits = [
            (depth, 0, dtype, f"scope {p!r}")
            for depth, p, dtype in self.policy.scope_matches(names)
        ]
        hits += [(depth, 1, jnp.dtype(mark), f"scope {mark}") for depth, mark in marks]
        rules = self.policy.rules_in(names)
        if not hits:
            return Region(np.dtype(self.policy.compute_dtype), False, "", names, rules)
        # Of equals the latest pattern wins; max returns the first.
        _, _, dtype, cause = max(reversed(hits), key=lambda hit: hit[:2])
        return Region(None if dtype == np.float32 else dtype, False, cause, names, rules)

    def plan_program(
        self, jaxpr: Any, inputs: Sequence[ValueState], wanted: Sequence[Wanted]
    ) -> Plan:
        """Plans a whole program: its caller gets each output in the dtype it is returned in.

        Args:
            jaxpr: The closed jaxpr.
            inputs: What is known of each input.
            wanted: What is asked of each output.

        Returns:
            The plan.
        """
        plan = self.plan(jaxpr, inputs, wanted)
        wanted = [
            want if state.returned is None else Wanted(dtype=state.returned)
            for want, state in zip(wanted, plan.outputs, strict=True)
        ]
        return self.plan(jaxpr, inputs, wanted)

    def plan(
        self,
        jaxpr: Any,
        inputs: Sequence[ValueState],
        wanted: Sequence[Wanted],
        path: tuple[str, ...] = (),
    ) -> Plan:
        """Plans a jaxpr; equal questions about one jaxpr get the same plan object.

        Args:
            jaxpr: An open or closed jaxpr.
            inputs: What is known of each input.
            wanted: What is asked of each output.
            path: The enclosing scopes.

        Returns:
            The plan.
        """
        key = (id(jaxpr), tuple(inputs), tuple(wanted), path)
        planned = self._plans.get(key)
        if planned is None:
            # The jaxpr is kept alive with its plan, or another could get its id.
            planned = self._plans[key] = (jaxpr, self._plan(jaxpr, inputs, wanted, path))
        return planned[1]

    def _plan(
        self,
        jaxpr: Any,
        inputs: Sequence[ValueState],
        wanted: Sequence[Wanted],
        path: tuple[str, ...],
    ) -> Plan:
        body, const_values = body_of(jaxpr), consts_of(jaxpr)
        consts = tuple(
            ValueState(dtype, Leaf.CONST, extent=const_extent(value))
            if (dtype := float_dtype(v.aval))
            else ValueState(None)
            for v, value in zip(body.constvars, const_values, strict=True)
        )
        seeds = dict(zip(body.constvars, consts, strict=True))
        seeds.update(zip(body.invars, inputs, strict=True))
        requests: dict[int, tuple[Wanted, ...]] = {}
        equations, states = self._sweep(body, seeds, path, requests)
        for _ in range(4):
            more, demands = find_requests(body, equations, states, wanted, requests, self.policy)
            if not more:
                break
            requests.update(more)
            equations, states = self._sweep(body, seeds, path, requests)
        else:
            demands = input_demands(body, equations, wanted)
        outputs, output_dtypes = [], []
        for v, want in zip(body.outvars, wanted, strict=True):
            state = literal_state(v) if isinstance(v, Literal) else states[v]
            cast = None if want.dtype is None or state.dtype in (None, want.dtype) else want.dtype
            output_dtypes.append(cast)
            outputs.append(ValueState(cast) if cast is not None else state)
        identity = (
            all(e.keep for e in equations)
            and not any(output_dtypes)
            and all(_as_declared(v, s) for v, s in seeds.items())
        )
        low_copies = leaf_copies(body, equations, seeds)
        return Plan(
            body,
            consts,
            tuple(inputs),
            tuple(equations),
            tuple(outputs),
            tuple(output_dtypes),
            demands,
            low_copies,
            tuple(self.unknown),
            identity,
            path,
        )

    def _sweep(
        self,
        body: Any,
        seeds: dict[Any, ValueState],
        path: tuple[str, ...],
        requests: dict[int, tuple[Wanted, ...]],
    ) -> tuple[list[EquationPlan], dict[Any, ValueState]]:
        """The forward sweep: classes and votes, in program order."""
        states = dict(seeds)
        equations = []
        for i, eqn in enumerate(body.eqns):
            operands = [
                literal_state(v) if isinstance(v, Literal) else states[v] for v in eqn.invars
            ]
            region = self.region(path, scope_names(eqn))
            rule = STRUCTURAL_RULES.get(eqn.primitive.name)
            if rule is not None:
                plan = rule(self, eqn, operands, region, requests.get(i, ()))
            elif i in requests:
                plan = plan_equation(self, eqn, operands, region, requests[i])
            else:
                plan = self._plan_of_look(eqn, operands, region)
            if self._finds_returned and region.low is not None:
                _, origin = self.policy.rule_for(eqn.primitive.name, region.rules)
                results = with_returned(origin, eqn, plan, operands, region.low)
                if results is not plan.results:
                    plan = dataclasses.replace(plan, results=results)
            equations.append(plan)
            states.update(zip(eqn.outvars, plan.results, strict=True))
        return equations, states

    def _plan_of_look(
        self, eqn: Any, operands: Sequence[ValueState], region: Region
    ) -> EquationPlan:
        """Plans an equation of which nothing is asked; those that look alike share one plan.

        A program of many equations has few looks. With a plan each, planning took time that grew
        faster than the program: Python's garbage collector visited the plans again and again.
        """
        # A rule function may look at the source line, and a range costs a pass over its array.
        # The types of the results follow from the rest: JAX caches them so, too.
        if self._rule_functions or any([state.extent is not None for state in operands]):
            return plan_equation(self, eqn, operands, region)
        look = (
            eqn.primitive,
            region.low,
            region.cause,
            region.rules,
            *operands,
            *[v.aval for v in eqn.invars],
            *eqn.params,
            *eqn.params.values(),
        )
        try:
            plan = self._equations.get(look)
        except TypeError:  # a parameter without a hash
            return plan_equation(self, eqn, operands, region)
        if plan is None:
            plan = self._equations[look] = plan_equation(self, eqn, operands, region)
        return plan


def literal_state(literal: Any) -> ValueState:
    """Returns what is known of a literal."""
    dtype = float_dtype(literal.aval)
    shape = getattr(literal.aval, "shape", None)
    if shape == () and isinstance(literal.val, bool | int | float | np.generic | np.ndarray):
        known = np.asarray(literal.val)
        if known.dtype.kind in "iufb" or dtype is not None:
            return ValueState(dtype, Leaf.LITERAL if dtype else None, known=float(known))
    return ValueState(dtype, Leaf.CONST if dtype else None)


def _as_declared(var: Any, state: ValueState) -> bool:
    return state.dtype is None or state.dtype == var.aval.dtype
