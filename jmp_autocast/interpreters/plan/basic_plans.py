"""The plans that the rules choose between: kept, moved, folded, emitted, all in one dtype."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import DATA_MOVEMENT, FLOAT32, Decision
from ..primitives.reading import iota_length, preferred_dtype, with_preferred_dtype
from ..primitives.traits import having
from .data import (
    BIND,
    FLOAT_DTYPES,
    KEEP,
    Action,
    Bind,
    Demand,
    Emit,
    EquationPlan,
    Keep,
    Move,
    Reason,
    ReasonCode,
    Redispatch,
    Source,
    ValueState,
    Want,
    float_dtype,
)
from .symbolic_sizes import largest_index
from .value_facts import coordinate_bound
from .votes import is_replicated

_REDISPATCHED = having("redispatch")
_REPLICATES = having("replicates")

_NO_FLOAT = Reason(ReasonCode.NO_FLOAT)
_NOTHING = ValueState(None)


def because(code: ReasonCode, want: Want) -> Reason:
    """Returns the reason that a reader is."""
    return Reason(code, f"read by {want.reader}")


def keep(eqn: Any, given: Sequence[ValueState], reason: Reason) -> EquationPlan:
    """Returns the plan that hands the operands over in their declared dtypes."""
    operands = as_declared(eqn, given)
    results = tuple(ValueState(float_dtype(v.aval)) for v in eqn.outvars)
    return EquationPlan(BIND if any(operands) else KEEP, tuple(given), operands, results, reason)


def as_declared(eqn: Any, given: Sequence[ValueState]) -> tuple[np.dtype | None, ...]:
    """Returns the casts that bring operands back to their declared dtypes."""
    return tuple(
        None if s.dtype is None or s.dtype == v.aval.dtype else v.aval.dtype
        for v, s in zip(eqn.invars, given, strict=True)
    )


def in_dtype(
    eqn: Any, given: Sequence[ValueState], floats: Sequence[int], target: np.dtype, reason: Reason
) -> EquationPlan:
    """Returns the plan in which all float operands are read in, and results are, ``target``."""
    operands: list[np.dtype | None] = [None] * len(given)
    for i in floats:
        if given[i].dtype != target:
            operands[i] = target
    bound = coordinate_bound(eqn.primitive.name, given, floats)
    declared = all(eqn.invars[i].aval.dtype == target for i in floats)
    unchanged = declared and not any(operands)
    results = [
        # With its own operands an equation has its own results: a float32 statistic of a 16-bit
        # attention kernel, or the user's preferred_element_type.
        _computed(dtype if unchanged else target, bound)
        if (dtype := float_dtype(v.aval)) is not None
        else _NOTHING
        for v in eqn.outvars
    ]
    action = KEEP if unchanged else _bound(eqn, given, floats, target)
    return EquationPlan(action, tuple(given), tuple(operands), tuple(results), reason)


def _bound(
    eqn: Any, given: Sequence[ValueState], floats: Sequence[int], target: np.dtype
) -> Action:
    """Returns how an equation is bound on operands of ``target``."""
    name = eqn.primitive.name
    if name in _REDISPATCHED and eqn.invars[0].aval.dtype != target:
        return Redispatch()
    replicates = ()
    if name in _REPLICATES and target != FLOAT32:
        unknown = [i for i in floats if given[i].known_value is None]
        replicates = tuple(i for i in unknown if is_replicated(eqn, i))
    if preferred_dtype(eqn) in FLOAT_DTYPES:
        return Bind(with_preferred_dtype(target), replicates)
    return Bind(replicates=replicates) if replicates else BIND


@functools.lru_cache(1024)
def _computed(dtype: np.dtype, bound: float | None) -> ValueState:
    """One object for equal states: a program of many equations has few."""
    return ValueState(dtype, integer_bound=bound)


def cast_results(plan: EquationPlan, decision: Decision) -> EquationPlan:
    """Returns the plan whose results are cast to the dtype that a rule asks for."""
    if decision.output_dtype is None:
        return plan
    dtype = np.dtype(decision.output_dtype)
    casts = tuple(dtype if s.dtype not in (None, dtype) else None for s in plan.results)
    results = tuple(ValueState(dtype) if s.dtype is not None else s for s in plan.results)
    action = BIND if any(casts) and isinstance(plan.action, Keep) else plan.action
    return dataclasses.replace(plan, casts=casts, results=results, action=action)


def emitted(eqn: Any, given: Sequence[ValueState], decision: Decision) -> EquationPlan:
    """Returns the plan that calls a rule's function in place of the equation.

    Args:
        eqn: The equation, ordinary or not.
        given: What is known of each operand.
        decision: What the rule decided; its ``emit`` is a function.
    """
    assert decision.emit is not None

    def read_in(v: Any, state: ValueState) -> np.dtype | None:
        if state.dtype is None:
            return None
        dtype = v.aval.dtype if decision.operand_dtype is None else decision.operand_dtype
        return None if dtype == state.dtype else np.dtype(dtype)

    def made_in(v: Any) -> ValueState:
        declared = float_dtype(v.aval)
        told = None if decision.output_dtype is None else np.dtype(decision.output_dtype)
        return ValueState(declared and (told or declared))

    name = decision.emitted_name
    operands = tuple(read_in(v, s) for v, s in zip(eqn.invars, given, strict=True))
    return EquationPlan(
        Emit(decision.emit, name),
        tuple(given),
        operands,
        tuple(map(made_in, eqn.outvars)),
        Reason(ReasonCode.EMIT, name),
        demands=tuple(Demand.of(d or s.dtype) for d, s in zip(operands, given, strict=True)),
    )


def without_floats(eqn: Any, given: Sequence[ValueState]) -> EquationPlan:
    """Integers and bools: nothing to cast, but bounds of coordinates to keep account of."""
    name = eqn.primitive.name
    bound = coordinate_bound(name, given, range(len(given))) if given else None
    if name == "iota":
        bound = largest_index(iota_length(eqn))
    known = given[0].known_value if name in DATA_MOVEMENT and len(given) == 1 else None
    source = Source.DATA if name == "iota" else None
    results = tuple(
        ValueState(dtype, source, known_value=known, integer_bound=bound)
        if (dtype := float_dtype(v.aval)) or bound is not None or known is not None
        else _NOTHING
        for v in eqn.outvars
    )
    return EquationPlan(KEEP, tuple(given), (None,) * len(given), results, _NO_FLOAT)


def move_source(eqn: Any, given: Sequence[ValueState], i: int) -> EquationPlan:
    """Data movement of a source gives a source: it is cast, small, before it is moved."""
    state = given[i]
    assert state.source is not None
    # Rows looked up by data are activations: they vote when they are full size.
    is_lookup = eqn.primitive.name == "gather" and state.source is Source.PARAM
    moved = dataclasses.replace(state, source=Source.DATA if is_lookup else state.source)
    results = tuple(moved if float_dtype(v.aval) else _NOTHING for v in eqn.outvars)
    reason = Reason(ReasonCode.SOURCE, f"data movement of a {state.source.value} source", (i,))
    return EquationPlan(Move(), tuple(given), (None,) * len(given), results, reason)


def folded(
    eqn: Any, given: Sequence[ValueState], floats: Sequence[int], known: float
) -> EquationPlan:
    """Returns the plan of an equation whose result is one value known at trace time."""
    plan = keep(eqn, given, Reason(ReasonCode.SOURCE, "a literal", tuple(floats)))
    results = tuple(ValueState(s.dtype, Source.LITERAL, known) for s in plan.results)
    return dataclasses.replace(plan, results=results)
