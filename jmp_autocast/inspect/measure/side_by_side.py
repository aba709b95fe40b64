"""Runs the equations of a jaxpr in several programs side by side, and enters what they call.

Measuring and tapping cotangents share this walk. They differ in what they enter, in what they do
with an equation, and in what a value refers to. A program is a jaxpr as it was traced, or as
`autocast` rewrites it.
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

    def emit(self, i: int, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Value]:
        """Runs equation ``i``.

        Args:
            i: The position of the equation.
            eqn: The equation.
            operands: Its operands, as arrays, literals, `Value` or `Scalar`.
        """
        # What the rewriter emits for a Python number differs from what it emits for an array: the
        # number is cast at trace time.
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

    def inner(self, i: int, eqn: JaxprEqn) -> list[Program]:
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


Programs: TypeAlias = Sequence[Program]
Arrays: TypeAlias = tuple[Any, ...]
"""One value of the jaxpr, as each of the programs has it."""

Context = TypeVar("Context")


class Values(NamedTuple):
    """One value of the jaxpr.

    Args:
        arrays: The value in each program.
        refs: What the value refers to: where its flags are found, or the taps that it comes from.
    """

    arrays: Arrays
    refs: frozenset[Any] = frozenset()


def refs_of(values: Iterable[Values]) -> frozenset[Any]:
    """Returns what a value refers to that is computed from, or moved from, these."""
    return frozenset().union(*(value.refs for value in values))


class Site(NamedTuple, Generic[Context]):
    """Where a walk is.

    Args:
        i: The position of the equation in its jaxpr.
        eqn: The equation.
        programs: The programs of the jaxpr.
        context: What the walk knows of the jaxpr, such as the scopes around it.
    """

    i: int
    eqn: JaxprEqn
    programs: Programs
    context: Context

    def inner(self) -> list[Programs]:
        """Returns the programs of each jaxpr inside the equation."""
        inner = (program.inner(self.i, self.eqn) for program in self.programs)
        return list(zip(*inner, strict=True))


class SideBySide(abc.ABC, Generic[Context]):
    """A walk over a jaxpr. It runs the equations, and what calls hold in the place of the calls."""

    def run(
        self, jaxpr: AnyJaxpr, programs: Programs, args: list[Values], context: Context
    ) -> list[Values]:
        """Runs a jaxpr, and returns its outputs in the dtypes that its caller gets.

        Args:
            jaxpr: The jaxpr, open or closed.
            programs: The programs of this jaxpr.
            args: Its arguments.
            context: What the walk knows of it.
        """

        def known(arrays: Iterable[Any]) -> list[Values]:
            return self.given((x,) * len(programs) for x in arrays)

        def literal(atom: Any) -> Values:
            value = literal_value(atom)
            is_number = isinstance(value, bool | int | float | complex)
            return known([np.asarray(value, atom.aval.dtype)[()] if is_number else value])[0]

        def step(i: int, eqn: JaxprEqn, operands: list[Values]) -> list[Values]:
            site = Site(i, eqn, programs, context)
            if not self.enters(eqn):
                return self.emit(site, operands)
            # The boundary of a call is where the plan casts: its inside reads the dtypes that were
            # planned for it, in each program its own.
            operands = _each(programs, lambda program, xs: program.enter(i, xs), operands)
            results = self.inside(site, operands)
            return _each(programs, lambda program, xs: program.leave(i, xs), results)

        # Only a program that is differentiated marks its inputs and constants. For all others an
        # array is an array.
        outputs = evaluate(
            jaxpr,
            _each(programs, Program.constants, known(consts_of(jaxpr))),
            _each(programs, Program.arguments, args),
            literal,
            step,
        )
        return _each(programs, Program.outputs, outputs)

    def inside(self, site: Site[Context], operands: list[Values]) -> list[Values]:
        """Runs the one jaxpr inside an equation, on the operands that are its inputs."""
        (body,), (programs,) = bodies(site.eqn), site.inner()
        args = [operands[k] for k in body.operands]
        made = self.run(body.jaxpr, programs, args, site.context)
        return [made[body.results.index(k)] for k in range(len(site.eqn.outvars))]

    @abc.abstractmethod
    def enters(self, eqn: JaxprEqn) -> bool:
        """True for an equation whose inside is run, instead of the equation itself."""

    @abc.abstractmethod
    def emit(self, site: Site[Context], operands: list[Values]) -> list[Values]:
        """Runs an equation itself, and returns its results."""

    def given(self, arrays: Iterable[Arrays]) -> list[Values]:
        """Returns values that no equation of this jaxpr made."""
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
