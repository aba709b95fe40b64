"""`explain`: which equation runs in which dtype, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.typing import DTypeLike

from ...autocast import ANNOTATED, Autocast, PlannedCall, kind_of
from ...backend import default_device
from ...call.arguments import check_function, name_of
from ...call.options import Options, autocast_options, tool_options
from ...call.wrapping import wrapper_of
from ...interpreters import Source
from ...interpreters.after.stored_reads import Copied, read_dtypes
from ...interpreters.after.unknown import unknown_primitives
from ...interpreters.after.walk import walk_plan
from ...interpreters.compat import fresh_make_jaxpr, jaxpr_as_fun
from ...policies import FLOAT32, Policy, narrow_dtypes
from ...policies.choices import Level
from ...policies.patterns import unmatched_patterns
from .as_it_runs import (
    declared_plan,
    holds_autocast,
    is_parameter_copy,
    low_dtypes,
    wide_of,
    with_reasons,
)
from .by_dtype import contraction_flops, guarded
from .jaxprs import count_casts
from .kept import kept_of
from .kept_bytes import KeptBytes, is_gradient, kept_bytes
from .report import Report
from .roofline import roofline_of
from .rows import Row, rows_of
from .totals import Totals


def explain(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    compute_dtype: DTypeLike | None = None,
    level: Level | None = None,
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
            and an equation of a backward pass has the reason of the one that it belongs to.
        *args: Its positional arguments, as arrays or ``jax.ShapeDtypeStruct``. A symbolic length of
            `jax.export` counts as 128 in FLOPs and bytes, and the report says so.
        policy: As for `autocast`; None for the wrapper's own, or float16.
        compute_dtype: As for `autocast`, instead of a policy or to say which it is.
        level: As for `Policy.with_level`; None for the policy's.
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
    chosen = tool_options(compute_dtype, policy, level)
    wrapper = looked_at(fn, chosen, "explain", args, kwargs)
    as_it_runs = chosen is None and wrapper is not fn
    with ANNOTATED(as_it_runs):  # which changes nothing in a program that holds no autocast
        planned = wrapper.planned(*args, **kwargs)
    if as_it_runs and holds_autocast(planned.closed):
        return _as_it_runs(name_of(fn), planned, wrapper.policy)
    chosen = wrapper.policy
    visits = walk_plan(planned.plan, planned.call.paths)
    rows = tuple(rows_of(visits, chosen))
    unmatched = unmatched_patterns(chosen, {visit.scope for visit in visits})
    totals = _totals(planned, rows, unmatched)
    dtype, reason = str(chosen.compute_dtype), ""
    if planned.choice is not None:
        dtype, reason = str(planned.choice.dtype or FLOAT32), planned.choice.reason
    kept = None if planned.residuals.is_off else kept_of(planned, name_of(fn))
    wide = chosen.wide_dtype
    roofline = roofline_of(rows, default_device(), wide)
    return Report(name_of(fn), dtype, rows, totals, reason, kept, roofline, wide.name)


def _as_it_runs(name: str, planned: PlannedCall, policy: Policy) -> Report:
    """Reports a program that holds autocast itself: its jit, its gradient, a training step."""
    plan = declared_plan(planned.traced, planned.plan.wide)
    visits = walk_plan(plan, planned.call.paths)
    inputs = planned.plan.inputs
    sources = dict(zip(planned.call.paths, inputs, strict=True))
    rows = with_reasons(rows_of(visits, policy), visits, sources)
    # The policy is that of `explain`, and says nothing of the autocast that stands inside.
    wide = wide_of(rows)
    planned = dataclasses.replace(planned, plan=dataclasses.replace(plan, wide=wide, inputs=inputs))
    copies = sum(is_parameter_copy(row, wide) for row in rows)
    totals = _totals(planned, rows, ())
    totals = dataclasses.replace(totals, cast_parameters=copies, unknown=())
    roofline = roofline_of(rows, default_device(), wide)
    dtype = low_dtypes(rows, wide)
    return Report(name, dtype, rows, totals, roofline=roofline, wide_dtype=wide.name)


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
    if not isinstance(fn, Autocast):
        return wrapper_of(fn, options or autocast_options(), kind_of(fn, args, kwargs))
    if options is not None:
        raise ValueError(
            f"{by} got policy= (or compute_dtype=, level=) for a function that autocast has "
            "already wrapped with its own. Leave policy out, and compute_dtype and level, or pass "
            "the function that was wrapped."
        )
    return fn


def _totals(planned: PlannedCall, rows: Sequence[Row], unmatched: tuple[str, ...]) -> Totals:
    plan = planned.plan
    flops, low_flops, float8_flops = contraction_flops(rows, plan.wide)
    params = [i for i, state in enumerate(plan.inputs) if state.source is Source.PARAM]
    reads, narrow = read_dtypes(plan), narrow_dtypes(plan.wide)
    shapes = planned.call.shapes
    # Casts are counted in the program that runs: one cast serves all readers of a value, and a plan
    # asks for one per reader.
    rewritten = fresh_make_jaxpr(planned.rewritten, *shapes)
    residuals = KeptBytes()
    # What a gradient keeps for its backward pass is inside it. To differentiate it once more would
    # count what nobody keeps.
    if not is_gradient(planned.closed):
        residuals = kept_bytes(jaxpr_as_fun(rewritten), shapes, params, plan.wide)
    return Totals(
        equations=len(rows),
        flops=sum(row.flops for row in rows),
        contraction_flops=flops,
        low_contraction_flops=low_flops,
        guarded_contraction_flops=sum(row.flops for row in guarded(rows)),
        float8_contraction_flops=float8_flops,
        casts=count_casts(rewritten, plan.wide),
        parameters=len(params),
        cast_parameters=sum(len(reads[i].intersection(narrow)) for i in params),
        quantized_parameters=sum(Copied(0) in reads[i] for i in params),
        residual_nbytes=residuals.nbytes,
        float32_residual_nbytes=residuals.float32_nbytes,
        residual_error=residuals.error,
        unknown=unknown_primitives(planned.planner, plan),
        unmatched_scopes=unmatched,
        loops_of_unknown_length=sum(row.primitive == "while" for row in rows),
    )
