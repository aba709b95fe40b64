"""Plans jaxprs and equations under a policy; equal ones share a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ...policies import CONTRACTIONS, Policy
from ...policies.callables import has_hash
from ...policies.registry import has_rule_functions
from ..before import Preparation
from ..compat import AnyJaxpr, Atom, JaxprEqn, Literal, aval_of, body_of, consts_of, scope_names
from ..primitives.structure import STRUCTURES, has_rule
from ..primitives.traits import having
from ..regions import Regions
from .avals import float_dtype, is_16_bit
from .constant_range import constant_range
from .copies import products_of
from .data import Context, EquationPlan, Plan, Request, Source, ValueState, literal_state
from .equation import plan_equation
from .mark_sweep import Memo, marks_of
from .marks import CONSTANT, STENCIL, Marks
from .need_sweep import Needs, needs_of, promoted_by_rules
from .needs import EITHER, NOTHING, Need
from .structural import plan_structural, planning_rule
from .votes import rounded_stream

# A longer jaxpr gets no key and shares no plan, because a key costs time for each equation, and a
# long jaxpr is usually traced once, or jitted.
_MAX_EQNS = 32
_FUSES = having("fuses")


class Planner:
    """Plans a program: one instance per trace.

    Args:
        policy: The policy of the program.
        all_paths: Give each plan its full path of scopes, even if no pattern of the policy matches
            names. A layer at 96 paths is then planned 96 times.
        default_precision: As for `Region`.
    """

    def __init__(
        self,
        policy: Policy,
        all_paths: bool = False,
        default_precision: str | None = None,
    ) -> None:
        self.policy = policy
        self.default_precision = default_precision
        self._plans: dict[Any, tuple[Any, Plan]] = {}
        self._kinds: dict[tuple[Any, ...], Plan] = {}
        self._equations: dict[tuple[Any, ...], EquationPlan] = {}
        # Whether a function with a derivative or batching rule of the user's own was planned.
        self.has_rules: bool = False
        self._products = products_of(policy)
        self._rule_functions = has_rule_functions(policy.rules)
        has_scopes = any(scope != "*" for scope, _, _ in policy.rules)
        product = self._products.in_scope if self._products else None
        marks_only = not (has_scopes or self._rule_functions or all_paths)
        self.regions: Regions = Regions(policy, marks_only, product, default_precision)
        self.memo: Memo = {"promoted": promoted_by_rules(policy), "regions": self.regions}
        self.prepare: Preparation = Preparation(self.regions)
        options = policy, all_paths, default_precision
        self.anew: Callable[[], Planner] = functools.partial(Planner, *options)
        # Neither programs nor jaxprs share plans if a rule function may decide differently at each
        # call or source line, or if an extension reads whole programs and may plan equal equations
        # differently.
        self.key: Hashable = None if self._rule_functions or self._products else options

    def plan_program(
        self, jaxpr: AnyJaxpr, inputs: Sequence[ValueState], requests: Sequence[Request]
    ) -> Plan:
        """Plans a whole program, which an extension reads first.

        Args:
            jaxpr: The closed jaxpr, prepared by `prepare`.
            inputs: The state of each input.
            requests: The request for each output.

        Returns:
            The plan.
        """
        if self._products is not None:
            self._products.look_at(jaxpr)
        return self.plan(jaxpr, inputs, requests)

    def plan(
        self,
        jaxpr: AnyJaxpr,
        inputs: Sequence[ValueState],
        requests: Sequence[Request],
        path: tuple[str, ...] = (),
    ) -> Plan:
        """Plans a jaxpr; equal arguments give the same plan object.

        Args:
            jaxpr: An open or closed jaxpr.
            inputs: The state of each input.
            requests: The request for each output.
            path: The enclosing scopes.

        Returns:
            The plan.
        """
        # JAX gives the layers of a model one jaxpr if their types agree. They share one plan if the
        # states of the inputs and the requests for the outputs agree, too.
        question = tuple(inputs), tuple(requests), path
        key = (id(jaxpr), *question)
        if (planned := self._plans.get(key)) is not None:
            return planned[1]
        kind = None if self.key is None else kind_of(jaxpr)
        shared = (kind or id(jaxpr), *question)
        if shared not in self._kinds:
            self._kinds[shared] = self._plan(jaxpr, *question)
        # Each jaxpr gets a plan object of its own, even if its equations were planned for another
        # one.
        plan = dataclasses.replace(self._kinds[shared], jaxpr=body_of(jaxpr))
        # In the key, `path` has only the scopes that the policy distinguishes; see `Regions`.
        # The cache keeps the jaxpr alive, or another could get its id.
        self._plans[key] = jaxpr, plan
        return plan

    def _plan(
        self,
        jaxpr: AnyJaxpr,
        inputs: Sequence[ValueState],
        requests: Sequence[Request],
        path: tuple[str, ...],
    ) -> Plan:
        body = body_of(jaxpr)
        consts = tuple(map(_const_state, body.constvars, consts_of(jaxpr)))
        self.memo.update({v: s.marks for v, s in zip(body.constvars, consts, strict=True)})
        states = dict(zip((*body.constvars, *body.invars), (*consts, *inputs), strict=True))
        # A value that is no array, such as a token, has no dtype.
        as_declared = all(s.dtype is None or s.dtype == aval_of(v).dtype for v, s in states.items())
        marks = [state.marks for state in inputs]
        # A consumer of an output without a request is unknown, and may compute in float32.
        needed = [r.needs or (EITHER if r.dtype is None else Need.FULL) for r in requests]
        facts = marks_of(body, marks, self.memo)
        needs = needs_of(body, needed, self.memo, marks, path)
        equations = []
        for eqn, of_operands, kind in zip(body.eqns, facts.operands, facts.kinds, strict=True):
            name, given = eqn.primitive.name, _operands(eqn, states, needs, of_operands)
            of_results = [needs.get(v, NOTHING) for v in eqn.outvars]
            ctx = Context(
                eqn,
                name,
                given,
                [k for k, state in enumerate(given) if state.dtype is not None],
                self.policy,
                self.regions.at(path, eqn),
                tuple([Request(needs=n) for n in of_results]) if name in STRUCTURES else (),
                of_operands,
                of_results[0] if of_results else NOTHING,
                kind,
            )
            equation = self.plan_at(ctx)
            states.update(zip(eqn.outvars, equation.results, strict=True))
            equations.append(equation)
        outputs, output_dtypes = [], []
        for v, request in zip(body.outvars, requests, strict=True):
            state = literal_state(v) if isinstance(v, Literal) else states[v]
            unchanged = request.dtype is None or state.dtype in (None, request.dtype)
            output_dtypes.append(None if unchanged else request.dtype)
            outputs.append(state if unchanged else ValueState(request.dtype))
        return Plan(
            body,
            consts,
            tuple(inputs),
            tuple(requests),
            tuple(equations),
            tuple(outputs),
            tuple(output_dtypes),
            # A body in which nothing changes keeps its own jaxpr, so that JAX finds it in its
            # caches, which go by identity.
            as_declared and all(e.unchanged for e in equations) and not any(output_dtypes),
            path,
        )

    def plan_at(self, ctx: Context) -> EquationPlan:
        """Plans an equation in its context; equations with equal contexts share one plan.

        With one plan for each equation, planning time grew faster than the program: Python's
        garbage collector visited the plans again and again.
        """
        if (rule := planning_rule(ctx.name)) is not None:
            self.has_rules |= has_rule(ctx.eqn)
            return rounded_stream(ctx, plan_structural(rule, self, ctx))
        # No plan is shared if a rule function may depend on the source line, or if an operand has a
        # range, because comparing ranges takes a pass over the array.
        is_alone = ctx.kind is None or self._rule_functions
        has_range = any([state.const_range is not None for state in ctx.given])
        if is_alone or has_range or (ctx.region.product and ctx.name in CONTRACTIONS):
            return rounded_stream(ctx, plan_equation(ctx))
        region = ctx.region
        precision = region.compute_dtype, region.cause, region.rule, region.precision
        signature = (ctx.kind, *precision, ctx.need, *ctx.given)
        if (plan := self._equations.get(signature)) is None:
            # The plan can be shared: the states that it holds are part of the signature.
            plan = self._equations[signature] = rounded_stream(ctx, plan_equation(ctx))
        return plan


def _const_state(var: Atom, value: Any) -> ValueState:
    dtype = float_dtype(var.aval)
    source = None if dtype is None else Source.CONST
    found = None if dtype is None else constant_range(value)
    is_stencil = found is not None and found.small.is_stencil
    marks = STENCIL if is_stencil else CONSTANT
    return ValueState(dtype, source, const_range=found, marks=marks)


def _operands(
    eqn: JaxprEqn, states: Mapping[Any, ValueState], needs: Needs, marks: Sequence[Marks]
) -> tuple[ValueState, ...]:
    """Returns the states of the operands of an equation, with the facts for its bodies."""
    name = eqn.primitive.name
    given = [literal_state(v) if isinstance(v, Literal) else states[v] for v in eqn.invars]
    if name in STRUCTURES:
        pairs = zip(given, marks, strict=True)
        given = [s if m == s.marks else dataclasses.replace(s, marks=m) for s, m in pairs]
    if name in STRUCTURES or name in _FUSES:
        given = [
            dataclasses.replace(s, is_shared=True)
            if is_16_bit(s.dtype) and s.is_computed and needs[v] & Need.SHARED
            else s
            for v, s in zip(eqn.invars, given, strict=True)
        ]
    return tuple(given)


def kind_of(jaxpr: AnyJaxpr) -> Hashable:
    """Returns a key of jaxprs that may share a plan, None for a jaxpr that is planned alone.

    JAX traces a function with a derivative rule of the user's own, such as ``jax.nn.relu6``, again
    at each call, and the rewriter traces each rule again. Calls that share a plan share the
    rewritten function, and JAX runs its rule once (`tests/derivatives/test_same_rules.py`).

    Args:
        jaxpr: An open or closed jaxpr.
    """
    body = body_of(jaxpr)
    if len(body.eqns) > _MAX_EQNS or body.constvars or consts_of(jaxpr) or body.effects:
        return None
    numbers = {v: i for i, v in enumerate(body.invars)}

    def keys(atoms: Sequence[Atom]) -> list[Hashable]:
        return [literal_key(v) if isinstance(v, Literal) else numbers[v] for v in atoms]

    parts: list[Hashable] = [tuple([v.aval for v in body.invars])]
    for eqn in body.eqns:
        parts.append((eqn.primitive, scope_names(eqn), *keys(eqn.invars)))
        parts.append((*eqn.params, *eqn.params.values(), *[v.aval for v in eqn.outvars]))
        numbers.update((v, len(numbers) + k) for k, v in enumerate(eqn.outvars))
    kind = (*parts, *keys(body.outvars))
    # A parameter of an equation may have no hash, and a literal that is an array has none.
    return kind if has_hash(kind) else None


def literal_key(literal: Literal) -> Hashable:
    """Returns the value and the type of a literal as a key."""
    # The key has the type, because 1, 1.0 and True are equal keys of a Python dict.
    value = literal.val
    known = value.tobytes() if isinstance(value, np.generic | np.ndarray) else repr(value)
    return type(value), known, literal.aval
