"""`explain`: which equation runs in which dtype, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ...autocast import ANNOTATED, Autocast, PlannedCall, kind_of
from ...backend import default_device, device_of, hardware_of, supposing
from ...call.arguments import check_function, name_of
from ...call.forms import check_options
from ...call.kernels import unmatched_kernels
from ...call.options import Options, autocast_options, tool_options
from ...call.wrapping import wrapper_of
from ...devices import CPU, Device, as_device, known_devices
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
from ...policies import FLOAT32, FLOAT64, Policy, PolicyLike, narrow_dtypes
from ...policies.errors import with_usage
from ...policies.patterns import unmatched_patterns
from ...policies.storage import unmatched_storage
from ...scopes import BECAUSE, GOVERNED, read_mark
from ..progress_bar import Show, shown_progress
from .jaxprs import count_casts
from .kept import KeptBytes, is_gradient, kept_bytes, kept_of
from .products import products_of
from .report import Report
from .roofline import device_time, roofline_of
from .rows import Row, note_on_sizes, rows_of
from .totals import Totals, contraction_flops, guarded
from .wire import is_partitioned, wide_gradients, wire_of


@with_usage("explain(fn, *args)")
def explain(
    fn: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = None,
    device: str | Device | Sequence[str | Device] | None = None,
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
        policy: As for `autocast`; None for the wrapper's own, or the default.
        device: The device to explain it for, by name (``"h100"``, ``"a100-40gb"``, ``"v5e"``,
            ``"mi300x"``, ``"cpu"``) or as a `jmp_autocast.inspect.Device` with its rates. The
            default dtype is then that of this device, and the report says what the program takes
            there at best. Of several the first chooses the dtype, and all stand beside each other;
            ``"all"`` are all that are known. None for the default device.
        **kwargs: Its keyword arguments.

    Returns:
        The report, for ``print(report)``, ``report.rows`` and ``report.totals``.

    Raises:
        TypeError: ``fn`` is not callable, or ``device`` is no device.
        ValueError: ``fn`` is an `autocast` wrapper that is not enabled, or one whose policy
            ``policy`` contradicts; no device of that name is known.

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
    devices = _devices(device)
    chosen = tool_options(policy)
    wrapper = looked_at(fn, chosen, "explain", args, kwargs)
    as_it_runs = chosen is None and wrapper is not fn
    with shown_progress(None) as show, supposing(devices[0]) if device else nullcontext():
        report, ran = _explained(fn, wrapper, as_it_runs, args, kwargs, show)
        return _on_devices(report, ran, devices, bool(device))


def _devices(asked: Any) -> tuple[Device, ...]:
    """Returns the devices that a report is about; the first of them chooses the dtype if asked."""
    if asked not in (None, "all"):
        several = asked if isinstance(asked, list | tuple) else (asked,)
        return tuple(map(as_device, several)) or _devices("all")
    # What JAX runs on is the first, but a CPU the last: it has no rates.
    hardware = default_device()
    here, known = device_of(hardware), known_devices()
    first = [here] if here else []
    return (*first, *(d for d in known if d is not here), *[CPU] * (hardware.platform == "cpu"))


class _Ran(NamedTuple):
    """What a report is about: the visits of its rows, the call, and the program that runs."""

    visits: Sequence[Visit]
    planned: PlannedCall
    rewritten: ClosedJaxpr


def _on_devices(report: Report, ran: _Ran, devices: Sequence[Device], asked: bool) -> Report:
    """Returns the report with what the program takes on devices."""
    rows, call = report.rows, ran.planned.call
    wire = wire_of(ran.rewritten)
    is_split = is_partitioned(ran.visits, call.arrays)
    if is_split:
        plan = ran.planned.plan
        pairs = zip(call.paths, plan.inputs, strict=True)
        params = {path for path, state in pairs if state.source is Source.PARAM}
        sent = wide_gradients(ran.visits, params, plan.wide)
        report = dataclasses.replace(report, wide_gradient_nbytes=sent)
    if report.wide_dtype != FLOAT32.name or note_on_sizes(rows):
        return dataclasses.replace(report, wire=wire)  # no rates of float64 are known here
    sizes = zip(call.paths, (math.prod(x.shape) for x in call.shapes), strict=True)
    products = products_of(rows, dict(sizes))
    note = _PARTITIONED if is_split else ""
    hardware = hardware_of(devices[0]) if asked else default_device()
    return dataclasses.replace(
        report,
        wire=wire,
        roofline=roofline_of(products, wire, hardware, note),
        devices=tuple(device_time(products, wire, d) for d in devices if products.rows),
        asked=asked,
    )


_PARTITIONED = "on one device: what XLA's partitioner splits and sends is not known before"


def _explained(
    fn: Any, wrapper: Autocast, as_it_runs: bool, args: Any, kwargs: Any, show: Show
) -> tuple[Report, _Ran]:
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
    unmatched = (*unmatched_patterns(chosen, scopes), *unmatched_kernels(chosen, list(scopes)))
    unmatched += tuple(unmatched_storage(chosen.storage, planned.paths))
    rewritten = fresh_make_jaxpr(planned.rewritten, *planned.call.shapes)
    totals = _totals(planned, rewritten, rows, unmatched)
    dtype, reason = str(chosen.compute_dtype), ""
    if planned.choice is not None:
        dtype, reason = str(planned.choice.dtype or FLOAT32), planned.choice.reason
    kept = None if planned.residuals.is_off else kept_of(planned, name_of(fn))
    wide = chosen.wide_dtype
    report = Report(name_of(fn), dtype, rows, totals, reason, kept, wide_dtype=wide.name)
    return report, _Ran(visits, planned, rewritten)


def _as_it_runs(name: str, planned: PlannedCall, policy: Policy) -> tuple[Report, _Ran]:
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
    rewritten = fresh_make_jaxpr(planned.rewritten, *planned.call.shapes)
    totals = _totals(planned, rewritten, rows, ())
    totals = dataclasses.replace(totals, cast_parameters=copies, unknown=())
    dtype = low_dtypes(rows, wide)
    report = Report(name, dtype, rows, totals, wide_dtype=wide.name)
    return report, _Ran(visits, planned, rewritten)


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


def _totals(
    planned: PlannedCall, rewritten: ClosedJaxpr, rows: Sequence[Row], unmatched: tuple[str, ...]
) -> Totals:
    plan = planned.plan
    flops, low_flops, float8_flops = contraction_flops(rows, plan.wide)
    params = [i for i, state in enumerate(plan.inputs) if state.source is Source.PARAM]
    reads, narrow = read_dtypes(plan), narrow_dtypes(plan.wide)
    kernels = kernels_in(walk_plan(plan), plan.wide)
    shapes = planned.call.shapes
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
        wide_kernel_flops=kernels.flops if kernels else 0,
        # In the program that runs: one cast serves all readers of a value, and a plan asks for one
        # per reader.
        casts=count_casts(rewritten, plan.wide),
        parameters=len(params),
        cast_parameters=sum(len(reads[i].intersection(narrow)) for i in params),
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


def declared_plan(jaxpr: AnyJaxpr, wide: np.dtype) -> Plan:
    """Returns the plan that runs a jaxpr as it is, down to what its loops and calls hold.

    Args:
        jaxpr: An open or closed jaxpr.
        wide: The wide dtype of the policy.
    """

    def states(atoms: Sequence[Any]) -> tuple[ValueState, ...]:
        return tuple(ValueState(float_dtype(v.aval, wide)) for v in atoms)

    body, equations = body_of(jaxpr), []
    for eqn in body.eqns:
        plans = tuple(declared_plan(held.jaxpr, wide) for held in bodies(eqn))
        action = Inside(plans, unchanged=True) if plans else KEEP
        reason = Reason(ReasonCode.STRUCTURAL if plans else ReasonCode.SCOPE)
        casts, results = (None,) * len(eqn.invars), states(eqn.outvars)
        equations.append(EquationPlan(action, states(eqn.invars), casts, results, reason))
    wants, outputs = (Want(),) * len(body.outvars), states(body.outvars)
    ends = states(body.constvars), states(body.invars), wants, tuple(equations), outputs
    return Plan(body, *ends, (None,) * len(body.outvars), (), (), identity=True, path=(), wide=wide)


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


def wide_of(rows: Sequence[Row]) -> np.dtype:
    """Returns the wide dtype of a program that runs: float64 where that and no 16 bits are in it.

    Args:
        rows: Its rows.
    """
    names = {name for row in rows for name in (*row.operands, *row.results)}
    has_low = any(dtype.name in names for dtype in narrow_dtypes(FLOAT32))
    return FLOAT64 if FLOAT64.name in names and not has_low else FLOAT32


def low_dtypes(rows: Iterable[Row], wide: np.dtype) -> str:
    """Returns the 16-bit dtypes of a program, such as ``"bfloat16"``; ``"float32"`` if none is.

    Args:
        rows: Its rows.
        wide: Its wide dtype.
    """
    low = {dtype.name for dtype in narrow_dtypes(wide)}
    found = dict.fromkeys(name for row in rows for name in row.operands if name in low)
    return " and ".join(found) or wide.name


def is_parameter_copy(row: Row, wide: np.dtype) -> bool:
    """True for the cast of a parameter to 16 bits.

    Args:
        row: A row.
        wide: The wide dtype of the program.
    """
    low = {dtype.name for dtype in narrow_dtypes(wide)}
    is_cast = row.primitive == "convert_element_type" and row.operand_sources[:1] == ("param",)
    return is_cast and row.declared_operands[0] not in low and row.results[0] in low
