"""Programs that run side by side: a jaxpr as it was traced, and as `autocast` rewrites it.

The flags of a value are bits such as "it holds a NaN".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...interpreters import Plan, Rewriter
from ...interpreters.compat import JaxprEqn, bound
from ...interpreters.plan.data import ValueState
from ...interpreters.primitives.structure import bodies
from ...interpreters.rewrite.values import Scalar, Value


class Program:
    """One way to run the equations of a jaxpr.

    Args:
        plan: The plan of the jaxpr; None to run the jaxpr as it was traced.
        rewriter: Emits the planned equations; None without a plan.
    """

    def __init__(self, plan: Plan | None = None, rewriter: Rewriter | None = None) -> None:
        self._plan = plan
        self._rewriter = rewriter

    def emit(self, i: int, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Runs equation ``i`` on arrays and literals."""
        if self._plan is None or self._rewriter is None:
            return bound(eqn, operands)
        equation = self._plan.equations[i]
        values = list(map(_value, operands, equation.given))
        return [value.array for value in self._rewriter.emit_equation(eqn, equation, values)]

    def enter(self, i: int, operands: Sequence[Any]) -> list[Any]:
        """Casts the operands of equation ``i`` to the planned dtypes of its bodies."""
        return _read(operands, self._plan and self._plan.equations[i].operands)

    def leave(self, i: int, results: Sequence[Any]) -> list[Any]:
        """Casts the results of equation ``i``'s bodies to the dtypes planned for its results."""
        return _read(results, self._plan and self._plan.equations[i].casts)

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Casts the outputs of the jaxpr to the dtypes that its caller expects."""
        return _read(values, self._plan and self._plan.output_dtypes)

    def inner(self, i: int, eqn: JaxprEqn) -> list[Program]:
        """Returns a program for each jaxpr inside equation ``i``."""
        plans = self._plan.equations[i].inner if self._plan else ()
        # An equation that autocast does not touch has no plans for its bodies: they run as traced.
        return [Program(plan, self._rewriter) for plan in plans or [None] * len(bodies(eqn))]


def _read(values: Sequence[Any], dtypes: Sequence[Any] | None) -> list[Any]:
    dtypes = dtypes or [None] * len(values)
    return [_value(x).read(dtype) for x, dtype in zip(values, dtypes, strict=True)]


def _value(x: Any, state: ValueState | None = None) -> Value | Scalar:
    """Wraps an operand for the rewriter. The plan's ``state`` says what is known about an array."""
    # The rewriter casts a `Scalar` at trace time, and the array of a `Value` at run time.
    if isinstance(x, bool | int | float | complex | np.generic):
        return Scalar(x)
    facts = {"known": state.known_value, "const_range": state.const_range} if state else {}
    return Value(x, **facts)


Programs: TypeAlias = Sequence[Program]
Arrays: TypeAlias = tuple[Any, ...]
"""The arrays of one value of a jaxpr, one for each program."""

Flags: TypeAlias = Callable[[], Any]
"""Returns the flags of a value, such as "it holds a NaN", as bits of an integer.

It is called only if an equation needs the flags.
"""


class Values(NamedTuple):
    """One value of a jaxpr, in all programs.

    Args:
        arrays: The value in each program.
        flags: Functions that return flags. The value has the flags of all of them.
    """

    arrays: Arrays
    flags: frozenset[Flags]


def flags_of(values: Iterable[Values]) -> frozenset[Flags]:
    """Returns the functions in the ``flags`` of all ``values``."""
    return frozenset().union(*(value.flags for value in values))


def each(
    programs: Programs, function: Callable[[Program, list[Any]], list[Any]], values: list[Values]
) -> list[Values]:
    """Applies ``function`` to each program and its arrays of ``values``; flags stay the same."""
    columns = [
        function(program, [value.arrays[k] for value in values])
        for k, program in enumerate(programs)
    ]
    rows = zip(*columns, strict=True)
    return [Values(x, value.flags) for x, value in zip(rows, values, strict=True)]
