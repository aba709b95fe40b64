"""Runs the equations of a jaxpr in several programs side by side, and inlines calls.

Measuring and tapping cotangents share this walk. They differ in the calls that they inline, in the
treatment of an equation, and in the references of a value. A program is a jaxpr as it was traced,
or as `autocast` rewrites it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ...interpreters import Plan, Rewriter
from ...interpreters.after.copies import read_often
from ...interpreters.compat import AnyJaxpr, JaxprEqn, bound, consts_of, literal_value
from ...interpreters.plan.data import Move, ValueState
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import bodies
from ...interpreters.rewrite.values import Scalar, Value


class Program:
    """One way to run the equations of a jaxpr.

    Args:
        plan: The plan of the jaxpr; None without one, as inside an opaque call.
        rewriter: Emits planned equations; None to run the jaxpr as it was traced.
        differentiated: The program is differentiated. Then a parameter is marked: each 16-bit use
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

    def marked(self, kind: str, arrays: list[Any]) -> list[Any]:
        """Returns the "inputs" or "consts" of the jaxpr as operands of the rewriter."""
        if self._rewritten is None or not self._differentiated:
            return arrays
        return list(map(Value.of, arrays, getattr(self._rewritten, kind)))

    def emit(self, i: int, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Value]:
        """Runs equation ``i``; operands are arrays, literals, `Value` or `Scalar`."""
        # The rewriter casts a Python number at trace time, unlike an array.
        if self._plan is None or self._rewriter is None:
            return list(map(Value, bound(eqn, [_as_value(x).array for x in operands])))
        equation = self._plan.equations[i]
        values = list(map(_as_value, operands, equation.given))
        results = self._rewriter.emit_equation(eqn, equation, values)
        for v, value in zip(eqn.outvars, results, strict=True):
            if v in self._often:
                value.is_read_often()
        return results

    def is_source(self, i: int, k: int) -> bool:
        """True if result ``k`` of equation ``i`` is a moved input or constant."""
        if self._plan is None:
            return False
        equation = self._plan.equations[i]
        # A moved parameter is a parameter, and its gradient accumulates in float32.
        is_source = isinstance(equation.action, Move) or equation.results[k].keeps_gradient
        return is_source or self._plan.jaxpr.eqns[i].outvars[k] in self._often

    def enter(self, i: int, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands of equation ``i`` in the dtypes of its bodies."""
        return _read(operands, self._rewritten and self._rewritten.equations[i].operands)

    def leave(self, i: int, results: Sequence[Any]) -> list[Any]:
        """Returns the results of the bodies of equation ``i`` in the dtypes of its plan."""
        return _read(results, self._rewritten and self._rewritten.equations[i].casts)

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the jaxpr in the dtypes of its call."""
        return _read(values, self._rewritten and self._rewritten.output_dtypes)

    def inner(self, i: int, eqn: JaxprEqn) -> list[Program]:
        """Returns a program for each jaxpr inside equation ``i``."""
        plans = self._plan.equations[i].inner if self._plan else ()
        # Equations that autocast does not touch have no plans inside, and run as traced.
        plans = plans or [None] * len(bodies(eqn))
        return [Program(plan, self._rewriter, self._differentiated) for plan in plans]


def _read(values: Sequence[Any], dtypes: Sequence[Any] | None) -> list[Any]:
    dtypes = dtypes or [None] * len(values)
    return [_as_value(x).read(dtype) for x, dtype in zip(values, dtypes, strict=True)]


def _as_value(x: Any, state: ValueState | None = None) -> Value | Scalar:
    """Returns an operand of the rewriter, with the facts about an array."""
    if isinstance(x, Value | Scalar):
        return x
    if isinstance(x, bool | int | float | complex | np.generic):
        return Scalar(x)
    facts = {"known": state.known_value, "const_range": state.const_range} if state else {}
    return Value(x, **facts)


Programs: TypeAlias = Sequence[Program]
Arrays: TypeAlias = tuple[Any, ...]
"""One value of the jaxpr in each of the programs."""

State = TypeVar("State")


class Values(NamedTuple):
    """One value of the jaxpr.

    Args:
        arrays: The value in each program.
        refs: The references of the value: its flags, or the taps that it depends on.
    """

    arrays: Arrays
    refs: frozenset[Any] = frozenset()


def refs_of(values: Iterable[Values]) -> frozenset[Any]:
    """Returns the references of a value that is computed from these, or moved."""
    return frozenset().union(*(value.refs for value in values))


class EqnContext(NamedTuple, Generic[State]):
    """One equation in its context.

    Args:
        i: The position of the equation in its jaxpr.
        eqn: The equation.
        programs: The programs of the jaxpr.
        state: The walk's own state in the jaxpr, such as the scopes around it.
    """

    i: int
    eqn: JaxprEqn
    programs: Programs
    state: State

    def inner(self) -> list[Programs]:
        """Returns the programs of each jaxpr inside the equation."""
        inner = (program.inner(self.i, self.eqn) for program in self.programs)
        return list(zip(*inner, strict=True))


class SideBySide(abc.ABC, Generic[State]):
    """A walk over a jaxpr that runs the equations, and inlines calls."""

    def run(
        self, jaxpr: AnyJaxpr, programs: Programs, args: list[Values], state: State
    ) -> list[Values]:
        """Runs a jaxpr, open or closed, and returns its outputs in the dtypes of its call."""

        def known(arrays: Iterable[Any]) -> list[Values]:
            return self.given((x,) * len(programs) for x in arrays)

        def literal(atom: Any) -> Values:
            value = literal_value(atom)
            is_number = isinstance(value, bool | int | float | complex)
            return known([np.asarray(value, atom.aval.dtype)[()] if is_number else value])[0]

        def step(i: int, eqn: JaxprEqn, operands: list[Values]) -> list[Values]:
            ctx = EqnContext(i, eqn, programs, state)
            if not self.enters(eqn):
                return self.emit(ctx, operands)
            # The plan casts at the boundary of a call, to the planned dtypes of each program.
            operands = _each(programs, lambda program, xs: program.enter(i, xs), operands)
            results = self.inside(ctx, operands)
            return _each(programs, lambda program, xs: program.leave(i, xs), results)

        consts = _each(programs, lambda p, xs: p.marked("consts", xs), known(consts_of(jaxpr)))
        inputs = _each(programs, lambda p, xs: p.marked("inputs", xs), args)
        outputs = evaluate(jaxpr, consts, inputs, literal, step)
        return _each(programs, Program.outputs, outputs)

    def inside(self, ctx: EqnContext[State], operands: list[Values]) -> list[Values]:
        """Runs the only body of an equation, on the operands that are its inputs."""
        (body,), (programs,) = bodies(ctx.eqn), ctx.inner()
        args = [operands[k] for k in body.operands]
        results = self.run(body.jaxpr, programs, args, ctx.state)
        return [results[body.results.index(k)] for k in range(len(ctx.eqn.outvars))]

    @abc.abstractmethod
    def enters(self, eqn: JaxprEqn) -> bool:
        """True for an equation whose bodies run instead of the equation itself."""

    @abc.abstractmethod
    def emit(self, ctx: EqnContext[State], operands: list[Values]) -> list[Values]:
        """Runs an equation itself, and returns its results."""

    def given(self, arrays: Iterable[Arrays]) -> list[Values]:
        """Returns values that no equation of this jaxpr has computed."""
        return [Values(each) for each in arrays]


def _each(
    programs: Programs, function: Callable[[Program, list[Any]], list[Any]], values: list[Values]
) -> list[Values]:
    """Applies a function of a program and its arrays to values of all programs."""
    columns = [
        function(program, [value.arrays[k] for value in values])
        for k, program in enumerate(programs)
    ]
    return [
        Values(x, value.refs) for x, value in zip(zip(*columns, strict=True), values, strict=True)
    ]
