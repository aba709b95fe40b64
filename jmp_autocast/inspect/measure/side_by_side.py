"""Runs the equations of a jaxpr in several programs side by side, and enters what they call.

Measuring and tapping cotangents share this walk. They differ in what they enter, in what they do
with an equation, and in what a value refers to.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ...interpreters.compat import consts_of, literal_value
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import bodies
from .measured import user_scopes
from .programs import Program

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
    eqn: Any
    programs: Programs
    context: Context

    def inner(self) -> list[Programs]:
        """Returns the programs of each jaxpr inside the equation."""
        inner = (program.inner(self.i, self.eqn) for program in self.programs)
        return list(zip(*inner, strict=True))


class SideBySide(abc.ABC, Generic[Context]):
    """A walk over a jaxpr. It runs the equations, and what calls hold in the place of the calls."""

    def run(
        self, jaxpr: Any, programs: Programs, args: list[Values], context: Context
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

        def step(i: int, eqn: Any, operands: list[Values]) -> list[Values]:
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
    def enters(self, eqn: Any) -> bool:
        """True for an equation whose inside is run, instead of the equation itself."""

    @abc.abstractmethod
    def emit(self, site: Site[Context], operands: list[Values]) -> list[Values]:
        """Runs an equation itself, and returns its results."""

    def given(self, arrays: Iterable[Arrays]) -> list[Values]:
        """Returns values that no equation of this jaxpr made."""
        return [Values(each) for each in arrays]


class ByScope(SideBySide[tuple[str, ...]]):
    """A walk whose context is the scopes of the user's own around a jaxpr."""

    def inside(self, site: Site[tuple[str, ...]], operands: list[Values]) -> list[Values]:
        """Runs what a call holds, within the scopes around the call."""
        return super().inside(site._replace(context=path_of(site)), operands)


def path_of(site: Site[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the scopes of the user's own around an equation."""
    return (*site.context, *user_scopes(site.eqn))


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
