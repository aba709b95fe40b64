"""Equations in which nothing changes: most of a program, between its matmuls."""

from __future__ import annotations

from collections.abc import Sequence

from ...policies import DEFAULT_RULES
from ..compat import JaxprEqn, whole_name_stack
from ..compat.staging import staged_as_it_is
from ..plan.data import EquationPlan, Keep, Move
from .moves import as_moved, is_move
from .values import Scalar, Value

_OF_VALUES = frozenset(DEFAULT_RULES)


def written_again(
    eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[Value | Scalar]
) -> list[Value] | None:
    """Returns the results of an equation that is written as it is, None where it is bound.

    Args:
        eqn: The equation.
        plan: Its plan.
        operands: Its operands.
    """
    is_moved = isinstance(plan.action, Move)
    if not (is_moved or isinstance(plan.action, Keep)) or plan.casts:
        return None
    if eqn.primitive.name not in _OF_VALUES or (is_moved and not is_move(eqn, plan)):
        return None
    # A value that is read often is read through a view.
    if any([isinstance(x, Value) and x.wide is not None for x in operands]):
        return None
    results = staged_as_it_is(eqn, [x.array for x in operands])
    if results is None:
        return None
    if is_moved:
        return as_moved(eqn, plan, operands, results, whole_name_stack(eqn))
    return [Value.of(x, s) for x, s in zip(results, plan.results, strict=True)]
