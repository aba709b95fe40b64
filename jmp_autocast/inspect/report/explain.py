"""`explain`: the dtypes of each equation, and the reason for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...autocast import ANNOTATED, PlannedCall, wrapper_for
from ...call.arguments import name_of
from ...interpreters import Source, compat
from ...interpreters.after.kept_wide import wide_kernel_flops
from ...interpreters.after.walk import Visit, equations_once, walk_plan
from ...interpreters.plan.avals import float_dtype
from ...interpreters.plan.data import (
    KEEP,
    EquationPlan,
    Inside,
    Plan,
    Reason,
    ReasonCode,
    Request,
    ValueState,
)
from ...interpreters.plan.reads import Copied, read_dtypes
from ...interpreters.plan.structural import planning_rule
from ...interpreters.primitives.structure import bodies, equations_in
from ...policies import COMPUTE_DTYPES, CONTRACTIONS, E4M3, FLOAT32, Policy, PolicyLike
from ...policies.errors import with_usage
from ...policies.registry import known_rule
from ...policies.rules import unmatched_patterns
from ...scopes import BECAUSE, GOVERNED, read_mark
from .at_risk import at_risk, left_at_risk
from .jaxprs import count_casts
from .kept import KeptBytes, is_gradient, kept_bytes
from .report import Report
from .rows import Row, rows_of
from .totals import Totals, guarded, is_low

_LOW = {dtype.name for dtype in COMPUTE_DTYPES}


@with_usage("explain(fn, *args)")
def explain(
    fn: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> Report:
    """Reports in which dtypes `autocast` runs each equation of a function, and why.

    It computes nothing and accepts ``jax.ShapeDtypeStruct`` in place of any array, so a model is
    explained without its weights. To see the backward pass, explain the gradient:
    ``explain(jax.grad(loss), params, batch)``.

    Args:
        fn: The function in float32, or an `autocast` wrapper with its own options. If a function
            contains such a wrapper, as ``jax.jit(autocast(loss))``, ``jax.grad(autocast(loss))`` or
            a training step do, the report shows the program as it runs: casts are rows, and an
            equation of a backward pass has the reason of its forward equation. ``report.at_risk``
            lists the equations that lose precision with `autocast`, and, if the function is written
            in 16 bits, those that `autocast` would raise to float32.
        *args: Its positional arguments, as arrays or ``jax.ShapeDtypeStruct``. A symbolic length of
            `jax.export` counts as 128 in FLOPs and bytes; the report has a note on it.
        policy: A `Policy`, a 16-bit dtype or a jmp string; None for the policy of the wrapper, or
            for the default policy.
        **kwargs: Its keyword arguments.

    Returns:
        The report, for ``print(report)``, ``report.rows`` and ``report.totals``.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is an `autocast` wrapper that is disabled, or that has another policy
            than ``policy``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> def loss(params, x):
        ...     return jnp.mean(jax.nn.softmax(x @ params["w"]) ** 2)
        >>> params = {"w": jax.ShapeDtypeStruct((64, 10), jnp.float32)}
        >>> report = explain(loss, params, jnp.ones((8, 64)), policy=BF16)
        >>> report.summary
        'loss: 100.0 % of matmul and convolution FLOPs in bfloat16; 13 equations, 3 casts'
        >>> next(row.operands for row in report.rows if row.primitive == "exp")
        ('float32',)
    """
    wrapper = wrapper_for("explain", fn, policy, args, kwargs)
    as_it_runs = policy is None and wrapper is not fn
    # The context makes `autocast` wrappers inside `fn` write their reasons into scopes.
    with ANNOTATED(as_it_runs):
        planned = wrapper.planned(*args, **kwargs)
    name, chosen = name_of(fn), wrapper.policy
    if as_it_runs and _holds_autocast(planned.closed):
        return _as_it_runs(name, planned, chosen)
    visits = walk_plan(planned.plan, planned.call.paths)
    rows = tuple(rows_of(visits, chosen))
    totals, residuals = _totals(planned, rows)
    unmatched = unmatched_patterns(chosen, {visit.scope for visit in visits})
    totals = dataclasses.replace(totals, unmatched_scopes=unmatched)
    dtype, reason = str(chosen.compute_dtype), ""
    if planned.choice is not None:
        dtype, reason = str(planned.choice.dtype or FLOAT32), planned.choice.reason
    # If `fn` is a wrapper, it raises the equations that `at_risk` returns: they are not at risk.
    risks = () if wrapper is fn else at_risk(planned, chosen)
    risks += left_at_risk(visits, dtype)
    return Report(name, dtype, rows, totals, reason, residuals.rows, risks)


def _totals(planned: PlannedCall, rows: Sequence[Row]) -> tuple[Totals, KeptBytes]:
    """Returns a planned program's totals and residuals; ``unmatched_scopes`` is left empty."""
    plan, shapes = planned.plan, planned.call.shapes
    rewritten = compat.fresh_make_jaxpr(planned.rewritten, *shapes)
    params = [i for i, state in enumerate(plan.inputs) if state.source is Source.PARAM]
    # If the program contains a backward pass, no residuals are reported: the program consumes its
    # own, and `jax.vjp` would return the residuals of a second derivative.
    residuals = KeptBytes()
    if not is_gradient(planned.closed):
        residuals = kept_bytes(compat.jaxpr_as_fun(rewritten), shapes, params)
    reads = read_dtypes(plan)
    products = [row for row in rows if row.primitive in CONTRACTIONS]
    # The first two operands decide whether a product is in 16 or 8 bits. The third operand of a
    # ragged dot holds the sizes of its groups.
    low = [row for row in products if all(map(is_low, row.operands[:2]))]
    totals = Totals(
        equations=len(rows),
        flops=sum(row.flops for row in rows),
        contraction_flops=sum(row.flops for row in products),
        low_contraction_flops=sum(row.flops for row in low),
        guarded_contraction_flops=sum(row.flops for row in guarded(rows)),
        float8_contraction_flops=sum(row.flops for row in low if row.operands[0] == E4M3.name),
        wide_kernel_flops=wide_kernel_flops(plan),
        # Casts are counted in the rewritten program, in which one cast serves all consumers of a
        # value.
        casts=count_casts(rewritten),
        parameters=len(params),
        cast_parameters=sum(len(reads[i].intersection(COMPUTE_DTYPES)) for i in params),
        quantized_parameters=sum(Copied(0) in reads[i] for i in params),
        residual_nbytes=residuals.nbytes,
        float32_residual_nbytes=residuals.float32_nbytes,
        declared_residual_nbytes=residuals.uncast_nbytes if planned.residuals.is_off else None,
        residual_error=residuals.error,
        unknown=_unknown(planned),
        unmatched_scopes=(),
        loops_of_unknown_length=sum(row.primitive == "while" for row in rows),
    )
    return totals, residuals


def _unknown(planned: PlannedCall) -> tuple[str, ...]:
    """Returns the primitives that no rule covers, in order of appearance."""
    found: dict[str, None] = {}
    for body, eqn, *_ in equations_once(planned.plan):
        name, rule = eqn.primitive.name, planned.planner.regions.at(body.path, eqn).rule
        if planning_rule(name) is None and known_rule(name, rule)[1] == "unknown":
            found[name] = None
    return tuple(found)


# --- programs that hold autocast ----------------------------------------------------------------


def _as_it_runs(name: str, planned: PlannedCall, policy: Policy) -> Report:
    """Reports a program that contains autocast, such as a training step, as it runs."""
    inputs, plan = planned.plan.inputs, _declared_plan(planned.traced)
    visits = walk_plan(plan, planned.call.paths)
    sources = dict(zip(planned.call.paths, inputs, strict=True))
    pairs = zip(rows_of(visits, policy), visits, strict=True)
    rows = tuple(_with_reason(*pair, sources) for pair in pairs)
    planned = dataclasses.replace(planned, plan=dataclasses.replace(plan, inputs=inputs))
    totals, residuals = _totals(planned, rows)
    # If a primitive has no rule, the casts of its operands have the reason UNKNOWN, too. The
    # primitive of these casts is known, so it is removed.
    unknown = {row.primitive: None for row in rows if row.reason == ReasonCode.UNKNOWN.value}
    unknown.pop("convert_element_type", None)
    copies = sum(
        row.primitive == "convert_element_type"
        and row.operand_sources[:1] == ("param",)
        and row.declared_operands[0] not in _LOW
        and row.results[0] in _LOW
        for row in rows
    )
    totals = dataclasses.replace(totals, cast_parameters=copies, unknown=tuple(unknown))
    dtypes = dict.fromkeys(name for row in rows for name in row.operands if name in _LOW)
    return Report(name, " and ".join(dtypes) or FLOAT32.name, rows, totals, kept=residuals.rows)


_CAUSES = {True: "within autocast, which has no plan for it", False: "outside of autocast"}


def _holds_autocast(jaxpr: compat.AnyJaxpr) -> bool:
    """Returns whether a wrapper of `autocast` inside a program governs any of its equations."""
    equations = (eqn for eqn, _ in equations_in(jaxpr))
    return any(read_mark(name) == GOVERNED for eqn in equations for name in compat.scope_names(eqn))


def _declared_plan(jaxpr: compat.AnyJaxpr) -> Plan:
    """Returns a plan that leaves a jaxpr and the bodies of its equations as they are."""

    def states(atoms: Sequence[Any]) -> tuple[ValueState, ...]:
        return tuple(ValueState(float_dtype(v.aval)) for v in atoms)

    body, equations = compat.body_of(jaxpr), []
    for eqn in body.eqns:
        plans = tuple(_declared_plan(held.jaxpr) for held in bodies(eqn))
        action = Inside(plans, unchanged=True) if plans else KEEP
        reason = Reason(ReasonCode.STRUCTURAL if plans else ReasonCode.SCOPE)
        casts, results = (None,) * len(eqn.invars), states(eqn.outvars)
        equations.append(EquationPlan(action, states(eqn.invars), casts, results, reason))
    requests, outputs = (Request(),) * len(body.outvars), states(body.outvars)
    ends = states(body.constvars), states(body.invars), requests, tuple(equations), outputs
    return Plan(body, *ends, (None,) * len(body.outvars), identity=True, path=())


def _with_reason(row: Row, visit: Visit, sources: Mapping[str, ValueState]) -> Row:
    """Returns a row of the traced program with the reason that `autocast` wrote into its scopes."""
    marks = [(name, read_mark(name) or "") for name in visit.scope]
    because = [mark.removeprefix(BECAUSE) for _, mark in marks if mark.startswith(BECAUSE)]
    names = (n for n, mark in marks if mark != GOVERNED and not mark.startswith(BECAUSE))
    known = [sources[path].source if path else None for path in row.operand_inputs]
    code, cause = row.reason, _CAUSES[any(mark == GOVERNED for _, mark in marks)]
    # Enclosing calls may have reasons in the scopes, too: the last reason is the equation's own.
    if because:
        code, _, cause = because[-1].partition(" ")
    return dataclasses.replace(
        row,
        operand_sources=tuple(source.value if source else "" for source in known),
        scope="/".join(names),
        rule="",
        reason=code,
        cause=cause,
    )
