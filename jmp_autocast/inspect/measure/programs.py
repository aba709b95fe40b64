"""The programs that run side by side: a jaxpr as it was traced, and as `autocast` rewrites it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...interpreters import Plan, Rewriter
from ...interpreters.after.views import read_often
from ...interpreters.compat import bind
from ...interpreters.plan.data import Move, ValueState
from ...interpreters.primitives.structure import bodies
from ...interpreters.rewrite.values import Scalar, Value


class Program:
    """One way to run the equations of a jaxpr.

    Args:
        plan: The plan of the jaxpr; None where nothing is planned, as inside a call that is kept.
        rewriter: Emits planned equations; None to run the jaxpr as it was traced.
        differentiated: The program is differentiated. Then a parameter is marked: each 16-bit read
            of it is a view, whose gradient stays float32.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        rewriter: Rewriter | None = None,
        differentiated: bool = False,
    ) -> None:
        self._plan = plan
        self._rewriter = rewriter
        self._differentiated = differentiated
        self._rewritten = plan if rewriter is not None else None
        self._often = read_often(plan) if plan is not None else frozenset()

    def arguments(self, arrays: list[Any]) -> list[Any]:
        """Returns arguments of the jaxpr as the rewriter takes them."""
        return self._marked(arrays, self._rewritten and self._rewritten.inputs)

    def constants(self, arrays: list[Any]) -> list[Any]:
        """Returns constants of the jaxpr, as `arguments` does."""
        return self._marked(arrays, self._rewritten and self._rewritten.consts)

    def _marked(self, arrays: list[Any], states: Sequence[ValueState] | None) -> list[Any]:
        if states is None or not self._differentiated:
            return arrays
        return list(map(Value.of, arrays, states))

    def emit(self, i: int, eqn: Any, operands: Sequence[Any]) -> list[Value]:
        """Runs equation ``i``.

        Args:
            i: The position of the equation.
            eqn: The equation.
            operands: Its operands, as arrays, literals, `Value` or `Scalar`.
        """
        # What the rewriter emits for a Python number differs from what it emits for an array: the
        # number is cast at trace time.
        if self._plan is None or self._rewriter is None:
            values = list(map(_as_value, operands))
            out = bind(eqn.primitive, [value.array for value in values], eqn.params)
            return [Value(x) for x in (out if eqn.primitive.multiple_results else [out])]
        equation = self._plan.equations[i]
        values = list(map(_as_value, operands, equation.given))
        results = self._rewriter.emit_equation(eqn, equation, values)
        for v, value in zip(eqn.outvars, results, strict=True):
            if v in self._often:
                value.is_read_often()
        return results

    def is_source(self, i: int, k: int) -> bool:
        """True if result ``k`` of equation ``i`` is an input or a constant that was only moved."""
        if self._plan is None:
            return False
        equation = self._plan.equations[i]
        # What moves a parameter is one still, and its gradient is added up in float32.
        is_source = isinstance(equation.action, Move) or equation.results[k].keeps_gradient
        return is_source or self._plan.jaxpr.eqns[i].outvars[k] in self._often

    def enter(self, i: int, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands of equation ``i`` in the dtypes that its inside reads."""
        return _read(operands, self._rewritten and self._rewritten.equations[i].operands)

    def leave(self, i: int, results: Sequence[Any]) -> list[Any]:
        """Returns the results of equation ``i``, made inside, in the dtypes of its plan."""
        return _read(results, self._rewritten and self._rewritten.equations[i].casts)

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the jaxpr in the dtypes that its caller gets."""
        return _read(values, self._rewritten and self._rewritten.output_dtypes)

    def inner(self, i: int, eqn: Any) -> list[Program]:
        """Returns a program for each jaxpr inside equation ``i``."""
        plans = self._plan.equations[i].inner if self._plan else ()
        # What autocast leaves alone has no plans inside, and runs as it was traced.
        plans = plans or [None] * len(bodies(eqn))
        return [Program(plan, self._rewriter, self._differentiated) for plan in plans]


def _read(values: Sequence[Any], dtypes: Sequence[Any] | None) -> list[Any]:
    dtypes = dtypes or [None] * len(values)
    return [_as_value(x).read(dtype) for x, dtype in zip(values, dtypes, strict=True)]


def _as_value(x: Any, state: ValueState | None = None) -> Value | Scalar:
    """Returns an operand as the rewriter takes it; of an array, what is known of it is known."""
    if isinstance(x, Value | Scalar):
        return x
    if isinstance(x, bool | int | float | complex | np.generic):
        return Scalar(x)
    return (
        Value(x)
        if state is None
        else Value(x, known=state.known_value, const_range=state.const_range)
    )
