"""The public view of an equation, for rule functions and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import EquationView
from ..compat import Atom, JaxprEqn, function_name, source_line
from ..primitives.flops import flops
from ..primitives.reading import exponent, free_dimensions, reduction_depth
from ..primitives.structure import called, is_call
from .data import ValueState


def view_of(
    eqn: JaxprEqn, given: Sequence[ValueState], scope: Sequence[str], compute_dtype: np.dtype
) -> EquationView:
    """Returns the view of an equation for rule functions and reports.

    Args:
        eqn: The equation.
        given: The state of each operand.
        scope: The names of the enclosing scopes.
        compute_dtype: The compute dtype at the equation.
    """
    return EquationView(
        primitive=eqn.primitive.name,
        params=eqn.params,
        operand_shapes=_shapes(eqn.invars),
        operand_dtypes=_dtypes(eqn.invars),
        result_shapes=_shapes(eqn.outvars),
        result_dtypes=_dtypes(eqn.outvars),
        literals=tuple(state.known_value for state in given),
        scope="/".join(scope),
        compute_dtype=compute_dtype,
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
