"""What a rule function, and a report, see of an equation of a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policies import EquationView
from .compat import source_line
from .plan import ValueState


def view_of(
    eqn: Any, states: Sequence[ValueState], scope: Sequence[str], low: np.dtype
) -> EquationView:
    """Returns what a rule function and a report see of an equation.

    Args:
        eqn: The equation.
        states: What is known of each operand.
        scope: The names of the enclosing scopes.
        low: The compute dtype.
    """
    return EquationView(
        primitive=eqn.primitive.name,
        params=eqn.params,
        operand_shapes=_shapes(eqn.invars),
        operand_dtypes=_dtypes(eqn.invars),
        result_shapes=_shapes(eqn.outvars),
        result_dtypes=_dtypes(eqn.outvars),
        literals=tuple(s.known for s in states),
        scope="/".join(scope),
        compute_dtype=low,
        summarize_source=lambda: source_line(eqn),
    )


def _shapes(atoms: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(getattr(v.aval, "shape", ())) for v in atoms)


def _dtypes(atoms: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(getattr(v.aval, "dtype", None) for v in atoms)
