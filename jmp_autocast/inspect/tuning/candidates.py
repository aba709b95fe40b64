"""What `tune` can keep in float32: operations by scope and primitive, and policies that do so."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from ...interpreters import Plan, Planner, Want
from ...interpreters.compat import fresh_make_jaxpr, source_line
from ...interpreters.plan.walk import Visit, walk_plan
from ...policies import (
    COMPUTE_DTYPES,
    DEFAULT_RULES,
    FLOAT32,
    FULL_POLICIES,
    CastPolicy,
    Policy,
)
from ..report.explain import wrapper_of
from ..report.jaxprs import is_arithmetic
from .batches import Batch


class Candidate(NamedTuple):
    """What is kept in float32 together: the equations of one primitive in one scope.

    Args:
        scope: The names of the enclosing scopes, joined by ``/``.
        primitive: The primitive's name.
    """

    scope: str
    primitive: str


def candidates_of(
    fn: Callable[..., Any], policy: Policy, batch: Batch, argnums: Any = None
) -> dict[Candidate, str]:
    """Returns what a policy lowers in one call, in program order, each with a source line.

    Args:
        fn: The function in float32.
        policy: The policy.
        batch: The arguments of the call.
        argnums: The arguments that the function is differentiated by. What the rules of its custom
            derivatives compute follows then.
    """
    plans = [wrapper_of(fn, policy, "tune").planned(*batch.args).plan]
    if argnums is not None:
        plans += _derivative_rules(fn, policy, batch, argnums)
    found: dict[Candidate, str] = {}
    for visit in (visit for plan in plans for visit in walk_plan(plan)):
        if is_arithmetic(visit.eqn) and _is_lowered(visit):
            candidate = Candidate("/".join(visit.scope), visit.eqn.primitive.name)
            found.setdefault(candidate, source_line(visit.eqn))
    return found


def keeping(policy: Policy, candidates: Iterable[Candidate]) -> Policy:
    """Returns a policy under which some candidates run in float32, besides what it says already.

    Args:
        policy: The policy to start from.
        candidates: The candidates.
    """
    rules, scoped = dict(policy.rules), []
    for candidate in candidates:
        default = DEFAULT_RULES.get(candidate.primitive)
        # Of the policies that mean float32, the primitive's own: it may also set a dtype parameter.
        rule = CastPolicy.FP32
        if isinstance(default, CastPolicy) and default in FULL_POLICIES:
            rule = default
        if candidate.scope:
            scoped.append((glob.escape(candidate.scope), candidate.primitive, rule))
        else:
            rules[candidate.primitive] = rule
    return dataclasses.replace(
        policy, rules=tuple(rules.items()), scoped_rules=(*policy.scoped_rules, *scoped)
    )


def _is_lowered(visit: Visit) -> bool:
    """True for an equation that computes in 16 bits what the program declares as float32."""
    plan = visit.plan
    read = [dtype or state.dtype for dtype, state in zip(plan.operands, plan.given, strict=True)]
    made = [state.dtype for state in plan.results]
    return any(
        dtype in COMPUTE_DTYPES and v.aval.dtype == FLOAT32
        for v, dtype in zip([*visit.eqn.invars, *visit.eqn.outvars], [*read, *made], strict=True)
    )


def _derivative_rules(
    fn: Callable[..., Any], policy: Policy, batch: Batch, argnums: Any
) -> list[Plan]:
    """Returns the plans of derivative rules, which come into being while JAX differentiates.

    The policy may look at no scope, and plans then know of none; here each has to know its own.
    """
    wrapper = wrapper_of(fn, policy, "tune")
    plans: list[Plan] = []

    def run(*args: Any) -> Any:
        planned = wrapper.planned(*args)
        planner = Planner(policy, all_paths=True)
        wants = [Want(dtype=state.dtype) for state in planned.plan.outputs]
        plan = planner.plan_program(planned.closed, planned.plan.inputs, wants)
        planned = dataclasses.replace(planned, planner=planner, plan=plan)
        outputs = planned.rewritten(*planned.call.arrays, planned=plans.append)
        return planned.call.unflatten(outputs)

    def gradient(*arrays: Any) -> Any:
        return jax.tree.leaves(jax.value_and_grad(run, argnums)(*batch.signature.rebuilt(arrays)))

    fresh_make_jaxpr(gradient, *batch.arrays)
    return plans
