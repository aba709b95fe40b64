"""Programs that hold `autocast` themselves: what runs is what was traced.

While such a program is traced for a report, each equation carries the reason of its plan as a mark
on the name stack (`autocast.ANNOTATED`). Marks survive every transformation of JAX, so that an
equation of a backward pass still names the reason of the one that it was transposed from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...interpreters.compat import Literal, body_of, scope_names
from ...interpreters.plan.data import KEEP, EquationPlan, Inside, Plan, ValueState
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.plan.reasons import Reason, ReasonCode
from ...interpreters.plan.walk import Visit
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


def declared_plan(jaxpr: Any, inputs: Sequence[ValueState], wide: np.dtype) -> Plan:
    """Returns the plan that runs a jaxpr as it is, down to what its loops and calls hold.

    Args:
        jaxpr: An open or closed jaxpr.
        inputs: What is known of its inputs.
        wide: The wide dtype of the policy.
    """
    body, equations = body_of(jaxpr), []
    state = lambda v: ValueState(float_dtype(v.aval, wide))  # noqa: E731
    env: dict[Any, ValueState] = dict(zip(body.invars, inputs, strict=True))
    known = lambda v: state(v) if isinstance(v, Literal) else env.get(v, state(v))  # noqa: E731
    for eqn in body.eqns:
        given = tuple(map(known, eqn.invars))
        plans = []
        for held in bodies(eqn):
            carried, variables = held.carried, body_of(held.jaxpr).invars
            pairs = enumerate(zip(variables, held.operands, strict=True))
            entering = [state(v) if i in carried else given[k] for i, (v, k) in pairs]
            plans.append(declared_plan(held.jaxpr, entering, wide))
        equations.append(
            EquationPlan(
                action=Inside(tuple(plans), unchanged=True) if plans else KEEP,
                given=given,
                operands=(None,) * len(given),
                results=tuple(map(state, eqn.outvars)),
                reason=Reason(ReasonCode.STRUCTURAL if plans else ReasonCode.SCOPE),
            )
        )
    outputs = tuple(map(known, body.outvars))
    return Plan(
        jaxpr=body,
        consts=tuple(map(state, body.constvars)),
        inputs=tuple(inputs),
        equations=tuple(equations),
        outputs=outputs,
        output_dtypes=(None,) * len(outputs),
        demands=(),
        source_copies=(),
        unknown=(),
        identity=True,
        path=(),
        wide=wide,
    )


def with_reasons(rows: Iterable[Row], visits: Sequence[Visit]) -> tuple[Row, ...]:
    """Returns the rows with the reasons of the plans that their equations were emitted for.

    Args:
        rows: The rows of the traced program.
        visits: The visit of each row.
    """
    return tuple(map(_with_reason, rows, visits))


def _with_reason(row: Row, visit: Visit) -> Row:
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
