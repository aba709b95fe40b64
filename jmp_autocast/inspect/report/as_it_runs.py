"""Programs that hold `autocast` themselves: what runs is what was traced.

While such a program is traced for a report, each equation carries the reason of its plan as a mark
on the name stack (`autocast.ANNOTATED`). Marks survive every transformation of JAX, so that an
equation of a backward pass still names the reason of the one that it was transposed from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...interpreters.after.walk import Visit
from ...interpreters.compat import body_of, scope_names
from ...interpreters.plan.data import KEEP, EquationPlan, Inside, Plan, ValueState
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.plan.reasons import Reason, ReasonCode
from ...interpreters.primitives.structure import bodies, equations_in
from ...policies import FLOAT32, FLOAT64, narrow_dtypes
from ...scopes import BECAUSE, GOVERNED, read_mark
from .rows import Row

_CAUSES = {True: "within autocast, which has no plan for it", False: "outside of autocast"}


def holds_autocast(jaxpr: Any) -> bool:
    """True for a program in which an inner `autocast` governs a region.

    Args:
        jaxpr: An open or closed jaxpr.
    """
    equations = (eqn for eqn, _ in equations_in(jaxpr))
    return any(read_mark(name) == GOVERNED for eqn in equations for name in scope_names(eqn))


def declared_plan(jaxpr: Any, wide: np.dtype) -> Plan:
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
    return Plan(
        jaxpr=body,
        consts=states(body.constvars),
        inputs=states(body.invars),
        equations=tuple(equations),
        outputs=states(body.outvars),
        output_dtypes=(None,) * len(body.outvars),
        demands=(),
        fulls=(),
        identity=True,
        path=(),
        wide=wide,
    )


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
