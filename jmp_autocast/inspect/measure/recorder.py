"""Records the readings of the equations of a jaxpr.

A reading holds the measurements of an equation over all its runs, such as its count of NaNs.

XLA compiles one operation on a vector much faster than the same operation on a hundred scalars. So
a probe measures a few scalars when an equation runs, and the readings of all equations between two
loops are computed from them together.

The flags of a value are bits such as "it holds a NaN". The tick counts the measured equations that
have run since the start of the program.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...interpreters.compat import JaxprEqn, Tracer
from .devices import on_this_mesh
from .programs import Flags


class EquationRun(NamedTuple):
    """One equation that has just run, in all programs.

    Args:
        eqn: The equation.
        operands: The operands of the equation in each program.
        results: The results of the equation in each program.
        again: Runs the equation once more; it takes the index of a program, and the operands.
    """

    eqn: JaxprEqn
    operands: list[list[Any]]
    results: list[list[Any]]
    again: Any


class Probe(abc.ABC):
    """Measures equations. Readings are a pytree of arrays with one element per equation."""

    unread: Any
    """The reading of an equation that has not run, as scalars."""

    has_flags: bool = False
    """Whether readings depend on flags of operands, such as "it holds a NaN"."""

    @abc.abstractmethod
    def measure(self, run: EquationRun) -> Any:
        """Measures one run of an equation, and returns a pytree of a few scalars."""

    def flags_of(self, array: Any) -> Any:
        """Returns the flags of an array that is no result of a measured equation."""
        return 0

    def flags_made(self, measured: Any) -> Any:
        """Returns the flags of the results of an equation, given its measurements."""
        return 0

    @abc.abstractmethod
    def settle(self, measured: Any, held: Any, ticks: Any) -> Any:
        """Turns the measurements of one run of several equations into their readings.

        Args:
            measured: The measurements, an element per equation.
            held: The flags of their operands, an element per equation; None without `has_flags`.
            ticks: The number of equations that ran before each equation.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """Merges readings of the same equations: those of earlier (``first``) and of later runs."""

    def nothing(self, count: int) -> Any:
        """Returns the readings of equations that have not run."""
        return jax.tree.map(lambda x: jnp.full(count, x), self.unread)


class Recorder:
    """The readings of a jaxpr so far, in the order of its measured equations.

    Args:
        probe: The probe.
        tick: The number of measured equations that ran before this jaxpr.
    """

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self._measured: list[Any] = []
        self._held: list[Any] = []
        # If a jaxpr has no measured equation, its readings are empty arrays.
        self._readings = [probe.nothing(0)]
        self.tick: Any = tick

    @property
    def readings(self) -> Any:
        """The readings of the equations that have run."""
        return concatenated(self._readings)

    def add(self, run: EquationRun, read: Iterable[Flags]) -> frozenset[Flags]:
        """Measures an equation, given its operands' flags; returns the flags of its results."""
        measured = self._probe.measure(run)
        if not _is_traced(measured):
            measured = jax.device_get(measured)
        self._measured.append(measured)
        if not self._probe.has_flags:
            return frozenset()
        held = (on_this_mesh(flags()) for flags in read)
        self._held.append(functools.reduce(operator.or_, held, np.uint8(0)))
        made = functools.cache(lambda: self._probe.flags_made(on_this_mesh(measured)))
        return frozenset((made,))

    def take(self, readings: Any, tick: Any) -> None:
        """Appends readings, such as those of a loop body, and sets the tick after them."""
        self._readings.append(readings)
        self.tick = tick

    def settle(self) -> None:
        """Turns the measurements since the last call into readings.

        The evaluator calls this method before a loop or a branch, and at the end of the jaxpr.
        """
        measured, held = self._measured, self._held
        self._measured, self._held = [], []
        # The tick may be on another mesh than that of this trace, so it is moved to this mesh.
        self.tick = on_this_mesh(self.tick)
        count = len(measured)
        if not count:
            return
        # Ticks order the runs of all equations over time: a fault in an earlier iteration of a loop
        # comes before a fault of an earlier equation in a later iteration.
        ticks = self.tick + jnp.arange(count, dtype=jnp.uint32)
        settle = jax.jit(self._probe.settle)
        flags = _stacked(held) if held else None
        self.take(settle(_stacked(measured), flags, ticks), self.tick + jnp.uint32(count))


def _stacked(measured: Sequence[Any]) -> Any:
    """Returns measurements as arrays with an element per equation."""
    # Concrete numbers are stacked by NumPy: XLA would compile a program with an argument for each.
    numpy = jnp if _is_traced(measured) else np
    return jax.tree.map(lambda *xs: numpy.stack(xs), *on_this_mesh(measured))


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenates the readings of several groups of equations."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *on_this_mesh(parts))
