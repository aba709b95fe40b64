"""The candidates of `tune`: operations by scope and primitive, and policies for them."""

from __future__ import annotations

import dataclasses
import functools
import glob
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ...autocast import Autocast, kind_of
from ...call.options import autocast_options
from ...call.wrapping import wrapper_of
from ...interpreters import Plan, Planner, Request
from ...interpreters.after.walk import walk_plan
from ...interpreters.compat import fresh_make_jaxpr
from ...policies import DEFAULT_RULES, FULL_POLICIES, CastPolicy, Policy
from ...scopes import read_mark
from ..report.rows import Row, rows_of
from .batches import Batch, arrays_of


class Candidate(NamedTuple):
    """The equations of one primitive in one scope, with the names of scopes joined by ``/``."""

    scope: str
    primitive: str

    @property
    def operation(self) -> tuple[str, str]:
        """The candidate as an `Operation` of `effects`: without the scopes that autocast adds."""
        names = [name for name in self.scope.split("/") if read_mark(name) is None]
        return "/".join(names), self.primitive


def candidates_of(
    fn: Callable[..., Any], policy: Policy, batches: Iterable[Batch], argnums: Any
) -> dict[Candidate, str]:
    """Returns the operations that a policy lowers to 16 bits, with a source line each.

    They are in program order. With ``argnums``, the operations in custom derivative rules follow.
    """
    found: dict[Candidate, str] = {}
    # Batches of one kind have equal plans, so one batch of each kind is enough.
    for batch in {batch.kind: batch for batch in batches}.values():
        rows = rows_under(fn, policy, batch)
        if argnums is not None:
            for plan in _derivative_rules(fn, policy, batch, argnums):
                rows += rows_of(walk_plan(plan), policy)
        for row in rows:
            # Equations without FLOPs are no candidates: they move data, cast, or have bodies.
            if row.flops and _is_lowered(row):
                found.setdefault(Candidate(row.scope, row.primitive), row.source)
    return found


def rows_under(fn: Callable[..., Any], policy: Policy, batch: Batch) -> list[Row]:
    """Returns the rows of a function's report under a policy.

    `explain` would also differentiate the program, which takes longer than planning it.
    """
    wrapper = _wrapper(fn, policy, batch)
    return list(rows_of(walk_plan(wrapper.planned(*batch.args).plan), policy))


def _wrapper(fn: Callable[..., Any], policy: Policy, batch: Batch) -> Autocast:
    return wrapper_of(fn, autocast_options(policy), kind_of(fn, batch.args, {}))


def keeping(policy: Policy, candidates: Iterable[Candidate]) -> Policy:
    """Returns a policy with added rules that keep ``candidates`` in float32."""
    added = []
    for candidate in candidates:
        default = DEFAULT_RULES.get(candidate.primitive)
        # If the primitive's default rule keeps float32, this default rule is added, because it may
        # also set a dtype parameter.
        rule = CastPolicy.FP32
        if isinstance(default, CastPolicy) and default in FULL_POLICIES:
            rule = default
        # The scope is escaped: as a pattern, `layers[0]` would match `layers0`, and not itself.
        scope = glob.escape(candidate.scope) if candidate.scope else "*"
        added.append((scope, candidate.primitive, rule))
    # All rules are added at once, because a trial may keep 2,000 candidates, and each call of
    # `with_rules` checks all rules of the policy again.
    return dataclasses.replace(policy, rules=(*policy.rules, *added))


def _is_lowered(row: Row) -> bool:
    """Returns whether an operand or result is declared in float32 and runs in 16 bits."""
    pairs = zip(
        (*row.declared_operands, *row.declared_results), (*row.operands, *row.results), strict=True
    )
    return any(x == "float32" and y in ("bfloat16", "float16") for x, y in pairs)


def _derivative_rules(
    fn: Callable[..., Any], policy: Policy, batch: Batch, argnums: Any
) -> list[Plan]:
    """Returns the plans of custom derivative rules, which JAX traces while it differentiates.

    The plans record the scopes of all equations, even if no rule of the policy names a scope.
    """
    wrapper = _wrapper(fn, policy, batch)
    plans: list[Plan] = []

    def run(*args: Any) -> Any:
        planned = wrapper.planned(*args)
        planner = Planner(
            policy, all_paths=True, default_precision=planned.planner.default_precision
        )
        requests = [Request(dtype=state.dtype) for state in planned.plan.outputs]
        plan = planner.plan_program(planned.closed, planned.plan.inputs, requests)
        planned = dataclasses.replace(planned, planner=planner, plan=plan)
        outputs = planned.rewritten(*planned.call.arrays, planned=plans.append)
        return planned.call.unflatten(outputs)

    fresh_make_jaxpr(functools.partial(arrays_of(run, argnums), batch.signature), *batch.arrays)
    return plans
