"""Builds plans of equations that are kept, run in one dtype or replaced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...policies import FLOAT32, FLOAT_DTYPES, Decision, EquationView
from ..compat import Atom, JaxprEqn, aval_of, function_name, source_line
from ..primitives import reading
from ..primitives.flops import flops
from ..primitives.reading import exponent, free_dimensions, reduction_depth
from ..primitives.structure import called, is_call
from ..primitives.traits import having
from .data import (
    BIND,
    KEEP,
    Action,
    Bind,
    Context,
    Emit,
    EquationPlan,
    Keep,
    Reason,
    ReasonCode,
    Redispatch,
    ValueState,
)

_CONTRACTS = having("contracts")
_REDISPATCHED = having("redispatch")
_REPEATS = having("repeats")
_REPLICATES = having("replicates") | _REPEATS
_SUMS = having("sums")
_TRAVELS = having("travels")

# Equal states share one object: a program of many equations has few different states.
_computed = functools.lru_cache(ValueState)


def keep(ctx: Context, reason: Reason) -> EquationPlan:
    """Returns the plan that computes an equation in the dtypes that the program declares."""
    operands = as_declared(ctx)
    results = tuple(ValueState(ctx.declared(v)) for v in ctx.eqn.outvars)
    return EquationPlan(BIND if any(operands) else KEEP, ctx.given, operands, results, reason)


def as_declared(ctx: Context) -> tuple[np.dtype | None, ...]:
    """Returns the casts that bring operands back to their declared dtypes."""
    return tuple(
        None if s.dtype is None or s.dtype == aval_of(v).dtype else aval_of(v).dtype
        for v, s in zip(ctx.eqn.invars, ctx.given, strict=True)
    )


def in_dtype(ctx: Context, target: np.dtype, reason: Reason) -> EquationPlan:
    """Returns the plan with all float operands and results in ``target``."""
    operands = tuple([None if s.dtype in (None, target) else target for s in ctx.given])
    declared = all(aval_of(ctx.eqn.invars[i]).dtype == target for i in ctx.floats)
    unchanged = declared and not any(operands)
    # If the operands keep their dtypes, so do the results, such as a float32 statistic of a 16-bit
    # attention kernel, or a result in the user's preferred_element_type.
    dtypes = [d if d is None or unchanged else target for d in map(ctx.declared, ctx.eqn.outvars)]
    action = KEEP if unchanged else _bound(ctx, target)
    return EquationPlan(action, ctx.given, operands, tuple(map(_computed, dtypes)), reason)


def _bound(ctx: Context, target: np.dtype) -> Action:
    """Returns the action that binds an equation on operands in ``target``."""
    if ctx.name in _REDISPATCHED and aval_of(ctx.eqn.invars[0]).dtype != target:
        return Redispatch()
    # The transpose of a broadcast adds up the cotangents of all copies of one element, and needs
    # float32: a bfloat16 sum stops growing at 256 times its first term. A row gathered 8,192 times
    # had a gradient of 4.0 instead of 81.92. A value known at trace time has no gradient.
    floats = ctx.floats if ctx.name in _REPLICATES and target != FLOAT32 else ()
    unknown = [i for i in floats if ctx.given[i].known_value is None]
    # In a collective such as an all-gather, the cotangents of float32 weights are added in float32,
    # and those of 16-bit activations in 16 bits.
    if ctx.name in _TRAVELS:
        unknown = [i for i in unknown if ctx.given[i].dtype == FLOAT32]
    replicates = tuple([i for i in unknown if is_replicated(ctx.eqn, i)])
    if ctx.name in _CONTRACTS and reading.preferred_dtype(ctx.eqn) in FLOAT_DTYPES:
        return Bind(reading.with_preferred_dtype(target), replicates)
    # In float16 no gradient of a bias is rounded, because it may be out of range.
    adds = ctx.name in _SUMS and target == jnp.bfloat16 and ctx.policy.data_abstains
    biases = tuple([i for i in replicates if ctx.given[i].source is not None]) if adds else ()
    return Bind(replicates=replicates, biases=biases) if replicates else BIND


def is_replicated(eqn: JaxprEqn, i: int) -> bool:
    """Returns whether the transpose of an equation adds up cotangents of operand ``i``."""
    if eqn.primitive.name in _REPEATS:
        return reading.adds_up_cotangents(eqn)
    return aval_of(eqn.invars[i]).shape != aval_of(eqn.outvars[0]).shape


def cast_results(plan: EquationPlan, decision: Decision) -> EquationPlan:
    """Returns the plan with its results cast to the output dtype of a rule's decision, if any."""
    if decision.output_dtype is None:
        return plan
    return rounded_once(plan, np.dtype(decision.output_dtype))


def rounded_once(plan: EquationPlan, dtype: np.dtype) -> EquationPlan:
    """Returns the plan with its results cast to a dtype.

    Args:
        plan: The plan so far.
        dtype: The dtype of the results.
    """
    casts = tuple(None if s.dtype in (None, dtype) else dtype for s in plan.results)
    results = tuple(ValueState(dtype) if s.dtype is not None else s for s in plan.results)
    action = BIND if any(casts) and isinstance(plan.action, Keep) else plan.action
    return dataclasses.replace(plan, casts=casts, results=results, action=action)


def in_precision(ctx: Context, plan: EquationPlan, word: str | None) -> EquationPlan:
    """Returns the plan with a matmul precision for a float32 product.

    Args:
        ctx: The equation.
        plan: Its plan so far. It is returned unchanged if its operands are not float32, or if it
            has a precision.
        word: The precision, None for JAX's default matmul precision if one is set. The program is
            traced without this default, because JAX would write it into each product, where it
            would look like the program's own precision.
    """
    full: tuple[np.dtype | None, ...] = (FLOAT32,)
    if word is None and not reading.says_precision(ctx.eqn):
        # JAX's default also holds for complex numbers, whose planned dtype is None.
        word, full = ctx.region.default_precision, (FLOAT32, None)
    if ctx.name not in _CONTRACTS or not isinstance(plan.action, Keep | Bind) or word is None:
        return plan
    action = plan.action if isinstance(plan.action, Bind) else BIND
    parameter = reading.with_precision(ctx.eqn, word)
    is_full = all([dtype in full for dtype in plan.reads[:2]])
    if parameter is None or not is_full or not parameter.keys().isdisjoint(action.params):
        return plan
    action = dataclasses.replace(action, params={**action.params, **parameter})
    cause = f"{plan.reason.cause}, precision {word}".removeprefix(", ")
    reason = dataclasses.replace(plan.reason, cause=cause)
    return dataclasses.replace(plan, action=action, reason=reason)


def emitted(ctx: Context, decision: Decision) -> EquationPlan:
    """Returns the plan that calls a rule's function in place of the equation.

    Args:
        ctx: The equation; it may have bodies.
        decision: The rule's decision; its ``emit`` is a function.
    """
    assert decision.emit is not None
    output, read = decision.output_dtype, decision.operand_dtype
    # The planner trusts the rule; the rewriter checks the function's results.
    dtypes = [
        s.dtype and np.dtype(read or aval_of(v).dtype)
        for v, s in zip(ctx.eqn.invars, ctx.given, strict=True)
    ]
    operands = tuple(None if d == s.dtype else d for d, s in zip(dtypes, ctx.given, strict=True))
    declared = map(ctx.declared, ctx.eqn.outvars)
    results = tuple(ValueState(d and np.dtype(output or d)) for d in declared)
    action, reason = Emit(decision.emit, decision.emitted_name), decision.emitted_name
    return EquationPlan(action, ctx.given, operands, results, Reason(ReasonCode.EMIT, reason))


def view_of(ctx: Context) -> EquationView:
    """Returns the `EquationView` of an equation for rule functions."""
    eqn = ctx.eqn
    return EquationView(
        primitive=ctx.name,
        params=eqn.params,
        operand_shapes=_shapes(eqn.invars),
        operand_dtypes=_dtypes(eqn.invars),
        result_shapes=_shapes(eqn.outvars),
        result_dtypes=_dtypes(eqn.outvars),
        literals=tuple(state.known_value for state in ctx.given),
        scope="/".join(ctx.region.names),
        compute_dtype=ctx.compute_dtype,
        function=function_name(called(eqn)) if is_call(eqn) else "",
        exponent=exponent(eqn),
        free_dimensions=free_dimensions(eqn),
        summarize_source=lambda: source_line(eqn),
        count_depth=lambda: reduction_depth(eqn),
        count_flops=lambda: flops(eqn),
    )


def _shapes(atoms: Sequence[Atom]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(getattr(v.aval, "shape", ())) for v in atoms)


def _dtypes(atoms: Sequence[Atom]) -> tuple[Any, ...]:
    return tuple(getattr(v.aval, "dtype", None) for v in atoms)
