"""The units of `tune`: operations by scope and primitive, and policies that keep them so."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from ...interpreters import Plan, Rewriter
from ...interpreters.compat import Literal, consts_of, fresh_make_jaxpr, scope_names, source_line
from ...interpreters.plan.data import EquationPlan, ValueState
from ...interpreters.plan.value_facts import literal_state
from ...policies import (
    COMPUTE_DTYPES,
    DEFAULT_RULES,
    FLOAT32,
    FULL_POLICIES,
    CastPolicy,
    Policy,
)
from ..report.explain import wrapper_of
from ..report.rows import NOT_ARITHMETIC
from .batches import Batch


class Unit(NamedTuple):
    """What is kept in float32 together: the equations of one primitive in one scope.

    Args:
        scope: The names of the enclosing scopes, joined by ``/``.
        primitive: The primitive's name.
    """

    scope: str
    primitive: str


def units_of(
    fn: Callable[..., Any], policy: Policy, batch: Batch, argnums: Any = None
) -> dict[Unit, str]:
    """Returns what a policy lowers in one call, in program order, each with a source line.

    Args:
        fn: The function in float32.
        policy: The policy.
        batch: The arguments of the call.
        argnums: The arguments that the function is differentiated by. What the rules of its custom
            derivatives compute follows then.
    """
    found: dict[Unit, str] = {}
    plans = [wrapper_of(fn, policy, "tune").planned(*batch.args).plan]
    if argnums is not None:
        plans += _derivative_rules(fn, policy, batch, argnums)
    for plan in plans:
        for names, eqn in _lowered(plan, plan.path):
            found.setdefault(Unit("/".join(names), eqn.primitive.name), source_line(eqn))
    return found


def keeping(policy: Policy, units: Iterable[Unit]) -> Policy:
    """Returns a policy under which some units run in float32, besides what it says already.

    Args:
        policy: The policy to start from.
        units: The units.
    """
    rules, scoped = dict(policy.rules), []
    for unit in units:
        default = DEFAULT_RULES.get(unit.primitive)
        rule = CastPolicy.FP32
        if isinstance(default, CastPolicy) and default in FULL_POLICIES:
            rule = default
        if unit.scope:
            scoped.append((glob.escape(unit.scope), unit.primitive, rule))
        else:
            rules[unit.primitive] = rule
    return dataclasses.replace(
        policy, rules=tuple(rules.items()), scoped_rules=(*policy.scoped_rules, *scoped)
    )


def _lowered(plan: Plan, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the equations that compute in 16 bits what the program declares as float32."""
    body = plan.jaxpr
    states = dict(zip(body.constvars, plan.consts, strict=True))
    states.update(zip(body.invars, plan.inputs, strict=True))
    for eqn, equation in zip(body.eqns, plan.equations, strict=True):
        path = names + scope_names(eqn)
        given = [literal_state(v) if isinstance(v, Literal) else states[v] for v in eqn.invars]
        if eqn.primitive.name not in NOT_ARITHMETIC and _is_lowered(eqn, equation, given):
            yield path, eqn
        for inner in equation.inner:
            yield from _lowered(inner, path)
        states.update(zip(eqn.outvars, equation.results, strict=True))


def _is_lowered(eqn: Any, equation: EquationPlan, given: Sequence[ValueState]) -> bool:
    read = [dtype or state.dtype for dtype, state in zip(equation.operands, given, strict=True)]
    made = [state.dtype for state in equation.results]
    atoms = [*eqn.invars, *eqn.outvars]
    return any(
        dtype in COMPUTE_DTYPES and v.aval.dtype == FLOAT32
        for v, dtype in zip(atoms, [*read, *made], strict=True)
    )


# No scope has this name. With a pattern the planner looks at all names, and a plan has its path.
_NAMED = (("\0", FLOAT32),)


def _derivative_rules(
    fn: Callable[..., Any], policy: Policy, batch: Batch, argnums: Any
) -> list[Plan]:
    """Returns the plans of derivative rules, which come into being while JAX differentiates."""
    policy = dataclasses.replace(policy, scopes=(*policy.scopes, *_NAMED))
    named = wrapper_of(fn, policy, "tune")
    plans: list[Plan] = []

    def run(*args: Any) -> Any:
        planned = named.planned(*args)

        def plan(*question: Any) -> Plan:
            plans.append(planned.planner.plan(*question))
            return plans[-1]

        arrays = planned.call.arrays
        outputs = Rewriter(plan).evaluate(planned.plan, consts_of(planned.closed), arrays)
        return planned.call.unflatten(outputs)

    def gradient(*arrays: Any) -> Any:
        return jax.tree.leaves(jax.value_and_grad(run, argnums)(*batch.signature.rebuilt(arrays)))

    fresh_make_jaxpr(gradient, *batch.arrays)
    return plans
