"""What `tune` can keep in float32: operations by scope and primitive, their values, policies."""

from __future__ import annotations

import dataclasses
import functools
import glob
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...autocast import Autocast
from ...call.options import autocast_options
from ...interpreters import Plan, Planner, Want
from ...interpreters.after.walk import walk_plan
from ...interpreters.compat import fresh_make_jaxpr
from ...keep_less import keep_less
from ...policies import DEFAULT_RULES, FULL_POLICIES, CastPolicy, Policy, narrow_dtypes
from ...scopes import read_mark
from ..measure.basic_blocks import EquationRun, Probe
from ..measure.evaluator import Evaluator
from ..measure.measured import is_measurable, measured_equations
from ..measure.side_by_side import Program
from ..report.explain import looked_at
from ..report.kept import KeptArray, arrays_kept
from ..report.rows import Row, rows_of
from ..signature import Signature, Traced
from .batches import Batch, arrays_of


class Candidate(NamedTuple):
    """What is kept in float32 together: the equations of one primitive in one scope.

    Args:
        scope: The names of the enclosing scopes, joined by ``/``.
        primitive: The primitive's name.
    """

    scope: str
    primitive: str


def candidates_of(
    fn: Callable[..., Any], policy: Policy, batches: Iterable[Batch], argnums: Any
) -> dict[Candidate, str]:
    """Returns what a policy lowers, in program order, each with a source line.

    Args:
        fn: The function in float32.
        policy: The policy.
        batches: The arguments of the calls. Of those with equal shapes one will do.
        argnums: The arguments that the function is differentiated by. What the rules of its custom
            derivatives compute follows then.
    """
    found: dict[Candidate, str] = {}
    for batch in batches:
        rows = rows_under(fn, policy, batch)
        if argnums is not None:
            for plan in _derivative_rules(fn, policy, batch, argnums):
                rows += rows_of(walk_plan(plan), policy)
        for row in rows:
            # What has no FLOPs moves data, casts, or holds others: there is nothing to keep.
            if row.flops and _is_lowered(row, policy.wide_dtype):
                found.setdefault(Candidate(row.scope, row.primitive), row.source)
    return found


def rows_under(fn: Callable[..., Any], policy: Policy, batch: Batch) -> list[Row]:
    """Returns the rows of a function's report under a policy, without its totals.

    Totals differentiate the program, which takes longer than planning it.

    Args:
        fn: The function in float32.
        policy: The policy.
        batch: The arguments of the call.
    """
    wrapper = _wrapper(fn, policy, batch)
    return list(rows_of(walk_plan(wrapper.planned(*batch.args).plan), policy))


def kept_under(fn: Callable[..., Any], policy: Policy, batch: Batch) -> list[KeptArray]:
    """Returns the arrays that the backward pass of a function keeps under a policy.

    They are those of ``residuals="recompute"``: what is cheap to make again is not kept.

    Args:
        fn: The function in float32.
        policy: The policy.
        batch: The arguments of the call.
    """
    wrapper = keep_less(_wrapper(fn, policy, batch), residuals="recompute")
    return arrays_kept(wrapper.planned(*batch.args))


def _wrapper(fn: Callable[..., Any], policy: Policy, batch: Batch) -> Autocast:
    return looked_at(fn, autocast_options(policy), "tune", batch.args, {})


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
            # A scope is a name, not a pattern: Flax names a module `layers[0]`, and `[0]` would
            # match 0.
            scoped.append((glob.escape(candidate.scope), candidate.primitive, rule))
        else:
            rules[candidate.primitive] = rule
    # All at once: `with_rules` checks all rules of the policy again at each call, and a trial may
    # keep 2,000 candidates.
    return dataclasses.replace(
        policy, rules=tuple(rules.items()), scoped_rules=(*policy.scoped_rules, *scoped)
    )


def _is_lowered(row: Row, wide: np.dtype) -> bool:
    """True for an equation that computes in 16 bits what the program declares as float32."""
    low = {dtype.name for dtype in narrow_dtypes(wide)}
    declared = (*row.declared_operands, *row.declared_results)
    return any(
        before == wide.name and now in low
        for before, now in zip(declared, (*row.operands, *row.results), strict=True)
    )


def _derivative_rules(
    fn: Callable[..., Any], policy: Policy, batch: Batch, argnums: Any
) -> list[Plan]:
    """Returns the plans of derivative rules, which come into being while JAX differentiates.

    The policy may look at no scope, and plans then know of none; here each has to know its own.
    """
    wrapper = _wrapper(fn, policy, batch)
    plans: list[Plan] = []

    def run(*args: Any) -> Any:
        planned = wrapper.planned(*args)
        planner = Planner(
            policy, all_paths=True, default_precision=planned.planner.default_precision
        )
        wants = [Want(dtype=state.dtype) for state in planned.plan.outputs]
        plan = planner.plan_program(planned.closed, planned.plan.inputs, wants)
        planned = dataclasses.replace(planned, planner=planner, plan=plan)
        outputs = planned.rewritten(*planned.call.arrays, planned=plans.append)
        return planned.call.unflatten(outputs)

    fresh_make_jaxpr(functools.partial(arrays_of(run, argnums), batch.signature), *batch.arrays)
    return plans


def largest_of(
    fn: Callable[..., Any], candidates: Sequence[Candidate], batches: Sequence[Batch], argnums: Any
) -> list[float]:
    """Returns the largest finite magnitude among operands and results of each candidate.

    The program runs as `check_numerics` runs it, with one number per equation: with all that
    `check_numerics` counts, a program of 2,000 equations compiles four times as long.

    Args:
        fn: The function in float32.
        candidates: The candidates.
        batches: The batches.
        argnums: The arguments to differentiate by, None for the function alone.
    """
    called = arrays_of(fn, argnums)
    found: dict[Candidate, float] = defaultdict(float)

    @functools.partial(jax.jit, static_argnums=0)
    def run(signature: Signature, *arrays: Any) -> Traced:
        closed = fresh_make_jaxpr(functools.partial(called, signature), *arrays)
        evaluated = Evaluator(_Largest()).start(closed, [Program()], arrays)
        made = tuple(Candidate(e.scope, e.primitive) for e in measured_equations(closed))
        return Traced(evaluated.readings, made)

    # The largest of all batches: one batch that overflows is enough.
    for batch in batches:
        measured = run(batch.signature, *batch.arrays)
        for candidate, value in zip(measured.static, np.asarray(measured.arrays), strict=True):
            found[candidate] = max(found[candidate], float(value))
    # Measured equations have no marks of ours in their scopes, and candidates have.
    return [found[without_marks(candidate)] for candidate in candidates]


def without_marks(candidate: Candidate) -> Candidate:
    """Returns a candidate as programs have it whose scopes have no marks of ours.

    Args:
        candidate: The candidate.
    """
    names = [name for name in candidate.scope.split("/") if read_mark(name) is None]
    return Candidate("/".join(names), candidate.primitive)


class _Largest(Probe):
    """Measures the largest finite magnitude that an equation reads or makes."""

    unread = np.float32(0)

    def measure(self, run: EquationRun) -> Any:
        arrays = [x for x in (*run.operands[0], *run.results[0]) if is_measurable(jax.typeof(x))]
        return jnp.stack([_largest(x) for x in arrays]).max()

    def settle(self, measured: Any, held: Any, ticks: Any) -> Any:
        return measured

    def merge(self, first: Any, second: Any) -> Any:
        return jnp.maximum(first, second)


@jax.jit
def _largest(x: Any) -> Any:
    # An array without elements is not measured: `is_measurable`.
    magnitude = lax.abs(x)
    finite = lax.select(lax.is_finite(magnitude), magnitude, lax.full_like(magnitude, 0))
    largest = lax.reduce_max(finite, range(finite.ndim))
    if largest.dtype.itemsize > 4:  # beyond float32's range counts as the end of that
        largest = jnp.minimum(largest, jnp.finfo(jnp.float32).max)
    return largest.astype(jnp.float32)
