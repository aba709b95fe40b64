"""`explain`: which equation runs in which dtype, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...autocast import ANNOTATED, Autocast, PlannedCall, kind_of
from ...call.arguments import check_function, name_of
from ...call.forms import check_options
from ...call.options import Options, autocast_options, tool_options
from ...call.wrapping import wrapper_of
from ...interpreters import Source
from ...interpreters.after.kept_wide import kernels_in
from ...interpreters.after.stored_reads import Copied, read_dtypes
from ...interpreters.after.unknown import unknown_primitives
from ...interpreters.after.walk import Visit, walk_plan
from ...interpreters.compat import (
    AnyJaxpr,
    ClosedJaxpr,
    body_of,
    fresh_make_jaxpr,
    jaxpr_as_fun,
    scope_names,
)
from ...interpreters.plan.data import KEEP, EquationPlan, Inside, Plan, ValueState, Want
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.plan.reasons import Reason, ReasonCode
from ...interpreters.primitives.structure import bodies, equations_in
from ...policies import COMPUTE_DTYPES, FLOAT32, Policy, PolicyLike
from ...policies.errors import with_usage
from ...policies.rules import unmatched_patterns
from ...scopes import BECAUSE, GOVERNED, read_mark
from ..progress_bar import Show, shown_progress
from .at_risk import at_risk
from .jaxprs import count_casts
from .kept import KeptBytes, is_gradient, kept_bytes
from .report import Report
from .rows import Row, rows_of
from .totals import Totals, contraction_flops, guarded


@with_usage("explain(fn, *args)")
def explain(
    fn: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> Report:
    """Reports in which dtypes `autocast` runs a function, and the reason of each.

    It computes nothing and accepts ``jax.ShapeDtypeStruct`` in place of any array, so that you can
    explain a model without its weights. To see the backward pass, explain the gradient:
    ``explain(jax.grad(loss), params, batch)``.

    Args:
        fn: The function in float32, or an `autocast` wrapper, whose options then apply. A function
            that contains such a wrapper, as ``jax.jit(autocast(loss))``,
            ``jax.grad(autocast(loss))`` or a training step, is reported as it runs: casts are rows,
            and an equation of a backward pass has the reason of the one that it belongs to. Of a
            function that its author wrote in 16 bits, ``report.at_risk`` lists what `autocast`
            would compute in float32.
        *args: Its positional arguments, as arrays or ``jax.ShapeDtypeStruct``. A symbolic length of
            `jax.export` counts as 128 in FLOPs and bytes, and the report says so.
        policy: As for `autocast`; None for the wrapper's own, or the default.
        **kwargs: Its keyword arguments.

    Returns:
        The report, for ``print(report)``, ``report.rows`` and ``report.totals``.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is an `autocast` wrapper that is not enabled, or one whose policy
            ``policy`` contradicts.

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
    chosen = tool_options(policy)
    wrapper = looked_at(fn, chosen, "explain", args, kwargs)
    as_it_runs = chosen is None and wrapper is not fn
    with shown_progress(None) as show:
        return _explained(fn, wrapper, as_it_runs, args, kwargs, show)


def _explained(
    fn: Any, wrapper: Autocast, as_it_runs: bool, args: Any, kwargs: Any, show: Show
) -> Report:
    show("tracing and planning", 0, 2)
    with ANNOTATED(as_it_runs):  # which changes nothing in a program that holds no autocast
        planned = wrapper.planned(*args, **kwargs)
    show("reading the plan", 1, 2)
    if as_it_runs and holds_autocast(planned.closed):
        return _as_it_runs(name_of(fn), planned, wrapper.policy)
    chosen = wrapper.policy
    visits = walk_plan(planned.plan, planned.call.paths)
    rows = tuple(rows_of(visits, chosen))
    scopes = {visit.scope for visit in visits}
    unmatched = unmatched_patterns(chosen, scopes)
    rewritten = fresh_make_jaxpr(planned.rewritten, *planned.call.shapes)
    residuals = _residuals(planned, rewritten)
    totals = _totals(planned, rewritten, rows, unmatched, residuals)
    dtype, reason = str(chosen.compute_dtype), ""
    if planned.choice is not None:
        dtype, reason = str(planned.choice.dtype or FLOAT32), planned.choice.reason
    # What a wrapper raises is at risk only without it.
    risks = () if wrapper is fn else at_risk(planned, chosen)
    return Report(name_of(fn), dtype, rows, totals, reason, residuals.rows, risks)


def _as_it_runs(name: str, planned: PlannedCall, policy: Policy) -> Report:
    """Reports a program that holds autocast itself: its jit, its gradient, a training step."""
    plan = declared_plan(planned.traced)
    visits = walk_plan(plan, planned.call.paths)
    inputs = planned.plan.inputs
    sources = dict(zip(planned.call.paths, inputs, strict=True))
    rows = with_reasons(rows_of(visits, policy), visits, sources)
    planned = dataclasses.replace(planned, plan=dataclasses.replace(plan, inputs=inputs))
    copies = sum(is_parameter_copy(row) for row in rows)
    rewritten = fresh_make_jaxpr(planned.rewritten, *planned.call.shapes)
    residuals = _residuals(planned, rewritten)
    totals = _totals(planned, rewritten, rows, (), residuals)
    # The casts around a primitive without a rule have its reason.
    unknown = {row.primitive: None for row in rows if row.reason == ReasonCode.UNKNOWN.value}
    unknown.pop("convert_element_type", None)
    totals = dataclasses.replace(totals, cast_parameters=copies, unknown=tuple(unknown))
    dtype = low_dtypes(rows)
    return Report(name, dtype, rows, totals, kept=residuals.rows)


def looked_at(
    fn: Callable[..., Any],
    options: Options | None,
    by: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Autocast:
    """Returns the wrapper of a function that is looked at: the function itself if it is one.

    Args:
        fn: The function, or what `autocast` made of it.
        options: The options, None for the wrapper's own or the default.
        by: The public function that takes both.
        args: The positional arguments of the call: what holds state has a wrapper of its own kind.
        kwargs: The keyword arguments.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is a wrapper, and a policy is given as well.
    """
    check_function(fn, by, "Pass the function itself, then its arguments.")
    check_options(by, fn, kwargs)
    if not isinstance(fn, Autocast):
        return wrapper_of(fn, options or autocast_options(), kind_of(fn, args, kwargs))
    if options is not None:
        raise ValueError(
            f"{by} got policy= for a function that autocast has already wrapped with its own. "
            "Leave policy out, or pass "
            "the function that was wrapped."
        )
    return fn


def _residuals(planned: PlannedCall, rewritten: ClosedJaxpr) -> KeptBytes:
    """Returns what the program keeps for its backward pass, nothing for a gradient."""
    # What a gradient keeps for its backward pass is inside it. To differentiate it once more would
    # count what nobody keeps.
    if is_gradient(planned.closed):
        return KeptBytes()
    plan = planned.plan
    params = [i for i, state in enumerate(plan.inputs) if state.source is Source.PARAM]
    return kept_bytes(jaxpr_as_fun(rewritten), planned.call.shapes, params)


def _totals(
    planned: PlannedCall,
    rewritten: ClosedJaxpr,
    rows: Sequence[Row],
    unmatched: tuple[str, ...],
    residuals: KeptBytes,
) -> Totals:
    plan = planned.plan
    flops, low_flops, float8_flops = contraction_flops(rows)
    params = [i for i, state in enumerate(plan.inputs) if state.source is Source.PARAM]
    reads = read_dtypes(plan)
    kernels = kernels_in(walk_plan(plan))
    return Totals(
        equations=len(rows),
        flops=sum(row.flops for row in rows),
        contraction_flops=flops,
        low_contraction_flops=low_flops,
        guarded_contraction_flops=sum(row.flops for row in guarded(rows)),
        float8_contraction_flops=float8_flops,
        wide_kernel_flops=kernels.flops if kernels else 0,
        # In the program that runs: one cast serves all readers of a value, and a plan asks for one
        # per reader.
        casts=count_casts(rewritten),
        parameters=len(params),
        cast_parameters=sum(len(reads[i].intersection(COMPUTE_DTYPES)) for i in params),
        quantized_parameters=sum(Copied(0) in reads[i] for i in params),
        residual_nbytes=residuals.nbytes,
        float32_residual_nbytes=residuals.float32_nbytes,
        declared_residual_nbytes=residuals.uncast_nbytes if planned.residuals.is_off else None,
        residual_error=residuals.error,
        unknown=unknown_primitives(planned.planner, plan),
        unmatched_scopes=unmatched,
        loops_of_unknown_length=sum(row.primitive == "while" for row in rows),
    )


_CAUSES = {True: "within autocast, which has no plan for it", False: "outside of autocast"}


def holds_autocast(jaxpr: AnyJaxpr) -> bool:
    """True for a program in which an inner `autocast` governs a region.

    Args:
        jaxpr: An open or closed jaxpr.
    """
    equations = (eqn for eqn, _ in equations_in(jaxpr))
    return any(read_mark(name) == GOVERNED for eqn in equations for name in scope_names(eqn))


def declared_plan(jaxpr: AnyJaxpr) -> Plan:
    """Returns the plan that runs a jaxpr as it is, down to what its loops and calls hold.

    Args:
        jaxpr: An open or closed jaxpr.
    """

    def states(atoms: Sequence[Any]) -> tuple[ValueState, ...]:
        return tuple(ValueState(float_dtype(v.aval)) for v in atoms)

    body, equations = body_of(jaxpr), []
    for eqn in body.eqns:
        plans = tuple(declared_plan(held.jaxpr) for held in bodies(eqn))
        action = Inside(plans, unchanged=True) if plans else KEEP
        reason = Reason(ReasonCode.STRUCTURAL if plans else ReasonCode.SCOPE)
        casts, results = (None,) * len(eqn.invars), states(eqn.outvars)
        equations.append(EquationPlan(action, states(eqn.invars), casts, results, reason))
    wants, outputs = (Want(),) * len(body.outvars), states(body.outvars)
    ends = states(body.constvars), states(body.invars), wants, tuple(equations), outputs
    return Plan(body, *ends, (None,) * len(body.outvars), (), (), identity=True, path=())


def with_reasons(
    rows: Iterable[Row], visits: Sequence[Visit], sources: Mapping[str, ValueState]
) -> tuple[Row, ...]:
    """Returns the rows with the reasons of the plans that their equations were emitted for.

    Args:
        rows: The rows of the traced program.
        visits: The visit of each row.
        sources: What is known of each input, by its path.
    """
    return tuple(_with_reason(*pair, sources) for pair in zip(rows, visits, strict=True))


def _with_reason(row: Row, visit: Visit, sources: Mapping[str, ValueState]) -> Row:
    known = [sources[path].source if path else None for path in row.operand_inputs]
    row = dataclasses.replace(row, operand_sources=tuple(s.value if s else "" for s in known))
    marks = [mark for name in visit.scope if (mark := read_mark(name)) is not None]
    scope = "/".join(name for name in visit.scope if not _is_ours(name))
    because = [mark.removeprefix(BECAUSE) for mark in marks if mark.startswith(BECAUSE)]
    if because:
        # The innermost one: a call carries the reason of the call, and what is inside its own.
        code, _, cause = because[-1].partition(" ")
        return dataclasses.replace(row, scope=scope, rule="", reason=code, cause=cause)
    return dataclasses.replace(row, scope=scope, rule="", cause=_CAUSES[GOVERNED in marks])


def _is_ours(name: str) -> bool:
    mark = read_mark(name)
    return mark is not None and (mark == GOVERNED or mark.startswith(BECAUSE))


def low_dtypes(rows: Iterable[Row]) -> str:
    """Returns the 16-bit dtypes of a program, such as ``"bfloat16"``; ``"float32"`` if none is.

    Args:
        rows: Its rows.
    """
    low = {dtype.name for dtype in COMPUTE_DTYPES}
    found = dict.fromkeys(name for row in rows for name in row.operands if name in low)
    return " and ".join(found) or FLOAT32.name


def is_parameter_copy(row: Row) -> bool:
    """True for the cast of a parameter to 16 bits.

    Args:
        row: A row.
    """
    low = {dtype.name for dtype in COMPUTE_DTYPES}
    is_cast = row.primitive == "convert_element_type" and row.operand_sources[:1] == ("param",)
    return is_cast and row.declared_operands[0] not in low and row.results[0] in low
