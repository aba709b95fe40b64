"""The programs that run side by side: a jaxpr as it was traced, and as `autocast` rewrites it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...interpreters import Plan, Rewriter
from ...interpreters.compat import bind
from ...interpreters.plan.data import Move, ValueState
from ...interpreters.primitives.structure import bodies
from ...interpreters.rewrite.values import Scalar, Value


class Program:
    """One way to run the equations of a jaxpr.

    Args:
        plan: The plan of the jaxpr; None where nothing is planned, as inside a call that is kept.
        rewriter: Emits planned equations; None to run the jaxpr as it was traced.
    """

    def __init__(self, plan: Plan | None = None, rewriter: Rewriter | None = None) -> None:
        self._plan = plan
        self._rewriter = rewriter
        self._rewritten = plan if rewriter is not None else None

    def arguments(self, arrays: Sequence[Any]) -> list[Value]:
        """Returns arguments of the jaxpr as the rewriter takes them, for a program with gradients.

        A parameter is marked: each 16-bit read of it is a view, whose gradient stays float32.
        """
        return _marked(arrays, self._rewritten and self._rewritten.inputs)

    def constants(self, arrays: Sequence[Any]) -> list[Value]:
        """Returns constants of the jaxpr, as `arguments` does."""
        return _marked(arrays, self._rewritten and self._rewritten.consts)

    def emit(self, i: int, eqn: Any, operands: Sequence[Any]) -> list[Value]:
        """Runs equation ``i``.

        Args:
            i: The position of the equation.
            eqn: The equation.
            operands: Its operands, as arrays, literals, `Value` or `Scalar`.
        """
        values = [_as_value(x) for x in operands]
        if self._plan is None or self._rewriter is None:
            out = bind(eqn.primitive, [value.array for value in values], eqn.params)
            return [Value(x) for x in (out if eqn.primitive.multiple_results else [out])]
        return self._rewriter.emit_equation(eqn, self._plan.equations[i], values)

    def is_source(self, i: int, k: int) -> bool:
        """True if result ``k`` of equation ``i`` is an input or a constant that was only moved."""
        if self._plan is None:
            return False
        equation = self._plan.equations[i]
        return isinstance(equation.action, Move) or equation.results[k].keeps_gradient

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
        return [Program(plan, self._rewriter) for plan in plans or [None] * len(bodies(eqn))]


def _marked(arrays: Sequence[Any], states: Sequence[ValueState] | None) -> list[Value]:
    if states is None:
        return [Value(x) for x in arrays]
    return [Value(x, s.keeps_gradient) for x, s in zip(arrays, states, strict=True)]


def _read(values: Sequence[Any], dtypes: Sequence[Any] | None) -> list[Any]:
    dtypes = dtypes or [None] * len(values)
    return [_as_value(x).read(dtype) for x, dtype in zip(values, dtypes, strict=True)]


def _as_value(x: Any) -> Value | Scalar:
    if isinstance(x, Value | Scalar):
        return x
    return Scalar(x) if isinstance(x, bool | int | float | complex | np.generic) else Value(x)
