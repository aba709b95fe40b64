"""PROMOTE: an operation runs in the widest dtype among the operands that vote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import DATA_MOVEMENT, FLOAT32, Policy
from ..primitives.traits import having
from .basic_plans import because, in_dtype
from .data import Demand, EquationPlan, Reason, ReasonCode, Source, ValueState, Want
from .region import Region
from .votes import literal_guard, voters

_SATURATES = having("saturates")

_TENSOR_CORES = Reason(ReasonCode.PROMOTE_FULL, "level='tensor_cores'")


def promote(
    policy: Policy,
    eqn: Any,
    given: Sequence[ValueState],
    floats: Sequence[int],
    region: Region,
    wants: tuple[Want, ...],
) -> EquationPlan:
    """Returns the plan in the widest dtype among the operands that vote."""
    compute_dtype, name = region.compute_dtype, eqn.primitive.name
    assert compute_dtype is not None
    for want in wants:
        if want.demand is Demand.FULL:
            code = ReasonCode.LOG_GUARD if name in _SATURATES else ReasonCode.FEEDER
            return in_dtype(eqn, given, floats, FLOAT32, because(code, want))
        if want.demand is Demand.LOW and literal_guard(given, floats, compute_dtype) is None:
            reason = because(ReasonCode.CLEAR_NARROW, want)
            return in_dtype(eqn, given, floats, compute_dtype, reason)
    votes = voters(policy, eqn, given, floats)
    if not votes:
        # What a literal takes out of the range of 16 bits is computed: no cast may follow.
        reason = literal_guard(given, floats, compute_dtype)
        if reason is not None:
            return in_dtype(eqn, given, floats, FLOAT32, reason)
        return _of_sources(eqn, given, floats)
    declared_full = any(eqn.invars[i].aval.dtype == FLOAT32 for i in votes)
    if policy.level == "tensor_cores" and declared_full and name not in DATA_MOVEMENT:
        return in_dtype(eqn, given, floats, FLOAT32, _TENSOR_CORES)
    target = _common_dtype(given, votes)
    if target == FLOAT32:
        by = next((i for i in votes if given[i].dtype == FLOAT32), votes[0])
        return in_dtype(eqn, given, floats, target, _promote_full(given[by], by))
    reason = literal_guard(given, floats, target)
    if reason is not None:
        return in_dtype(eqn, given, floats, FLOAT32, reason)
    cause = f"operand{'s' * (len(votes) > 1)} {', '.join(map(str, votes))}"
    reason = Reason(ReasonCode.PROMOTE_LOW, cause, tuple(votes))
    return in_dtype(eqn, given, floats, target, reason)


def _common_dtype(given: Sequence[ValueState], positions: Sequence[int]) -> np.dtype:
    """Returns the one dtype of some operands, float32 where they differ."""
    dtypes = {given[i].dtype for i in positions}
    dtype = dtypes.pop() if len(dtypes) == 1 else FLOAT32
    assert dtype is not None
    return dtype


def _of_sources(eqn: Any, given: Sequence[ValueState], floats: Sequence[int]) -> EquationPlan:
    """What is made of sources alone is a source: it waits in its own dtype for who uses it."""
    kinds = {given[i].source for i in floats}
    order = (Source.DATA, Source.PARAM, Source.CONST)
    source = next((kind for kind in order if kind in kinds), Source.CONST)
    reason = Reason(ReasonCode.SOURCE, f"of {source.value} sources", tuple(floats))
    plan = in_dtype(eqn, given, floats, _common_dtype(given, floats), reason)
    results = tuple(
        ValueState(s.dtype, source, integer_bound=s.integer_bound) if s.dtype is not None else s
        for s in plan.results
    )
    return dataclasses.replace(plan, results=results)


def _promote_full(state: ValueState, i: int) -> Reason:
    what = "computed" if state.source is None else f"a {state.source.value} source"
    return Reason(ReasonCode.PROMOTE_FULL, f"operand {i} is float32, {what}", (i,))
