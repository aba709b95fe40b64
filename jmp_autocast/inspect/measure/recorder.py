"""What is measured of equations, and how measurements become readings of a jaxpr.

XLA compiles one operation on a vector much faster than the same operation on a hundred scalars. So
an equation contributes a few scalars when it runs, and the readings of all equations between two
loops are computed together.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...interpreters.compat import JaxprEqn, Tracer
from .devices import on_mesh_of, on_this_mesh


class EquationRun(NamedTuple):
    """One equation that has just run, in all programs.

    Args:
        eqn: The equation.
        operands: Its operands, per program.
        results: Its results, per program.
        again: Runs the equation once more in one program: takes the program's number and operands.
    """

    eqn: JaxprEqn
    operands: list[list[Any]]
    results: list[list[Any]]
    again: Any


class Probe(abc.ABC):
    """What is measured of an equation, and how measurements of many equations become readings.

    A reading is a pytree of arrays with one element per equation. The flags of a value are the bits
    of an integer, such as "it holds a NaN".
    """

    unread: Any
    """The reading of an equation that has not run, as scalars."""

    has_flags: bool = False
    """Whether an equation is judged by flags of its operands."""

    @abc.abstractmethod
    def measure(self, run: EquationRun) -> Any:
        """Returns a few numbers about one run of an equation, as a pytree."""

    def flags_of(self, array: Any) -> Any:
        """Returns the flags of an array that no measured equation made."""
        return 0

    def flags_made(self, measured: Any) -> Any:
        """Returns the flags of the results of an equation, given what was measured of it."""
        return 0

    @abc.abstractmethod
    def settle(self, measured: Any, held: Any, ticks: Any) -> Any:
        """Returns the readings of equations that have each run once.

        Args:
            measured: What was measured, an element per equation.
            held: The flags of their operands, an element per equation; None if there are none.
            ticks: The number of equations that ran before each.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """Returns the readings of two runs of the same equations, ``first`` the earlier."""

    def nothing(self, count: int) -> Any:
        """Returns the readings of equations that have not run."""
        return jax.tree.map(lambda x: jnp.full(count, x), self.unread)


class Flags:
    """The flags of an array, computed where an equation reads it.

    Args:
        compute: Returns them.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @functools.cached_property
    def bits(self) -> Any:
        """The flags, as the bits of an integer."""
        return self._compute()


def flags_of(probe: Probe, array: Any) -> frozenset[Flags]:
    """Returns the flags of an array that no measured equation made."""

    def compute() -> Any:
        with on_mesh_of(array):
            bits = probe.flags_of(array)
        return on_this_mesh(bits)

    return frozenset((Flags(compute),))


class Recorder:
    """The readings of a jaxpr so far, in the order of its measured equations.

    Args:
        probe: What is measured.
        tick: The number of measured equations that ran before.
    """

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self._measured: list[Any] = []
        self._held: list[Any] = []
        # A jaxpr may hold no measured equation, and its readings are arrays all the same.
        self._readings = [probe.nothing(0)]
        self.tick: Any = tick

    @property
    def readings(self) -> Any:
        """The readings of the equations that have run."""
        return concatenated(self._readings)

    def add(self, run: EquationRun, read: Iterable[Flags]) -> frozenset[Flags]:
        """Measures an equation, and returns the flags of its results, given those of operands."""
        measured = self._probe.measure(run)
        if not _traced(measured):
            measured = jax.device_get(measured)
        self._measured.append(measured)
        if not self._probe.has_flags:
            return frozenset()
        self._held.append(
            functools.reduce(operator.or_, (on_this_mesh(f.bits) for f in read), np.uint8(0))
        )
        return frozenset((Flags(lambda: self._probe.flags_made(on_this_mesh(measured))),))

    def take(self, readings: Any, tick: Any) -> None:
        """Takes over the readings of what is inside an equation, and how many ran up to there."""
        self._readings.append(readings)
        self.tick = tick

    def settle(self) -> None:
        """Makes readings of what was measured: where a loop or a branch begins, and at the end."""
        measured, held = self._measured, self._held
        self._measured, self._held = [], []
        # What was counted on another mesh goes on here.
        self.tick = on_this_mesh(self.tick)
        count = len(measured)
        if not count:
            return
        # Ticks put the runs of all equations in one order, also over the iterations of a loop: a
        # fault of an earlier iteration comes before one of an earlier equation.
        ticks = self.tick + jnp.arange(count, dtype=jnp.uint32)
        settle = jax.jit(self._probe.settle)
        flags = _stacked(held) if held else None
        self.take(settle(_stacked(measured), flags, ticks), self.tick + jnp.uint32(count))


def _stacked(measured: Sequence[Any]) -> Any:
    """Returns what was measured of each equation as arrays with an element per equation."""
    # XLA would compile a program with an argument for each of the numbers that are known.
    numpy = jnp if _traced(measured) else np
    return jax.tree.map(lambda *xs: numpy.stack(xs), *on_this_mesh(measured))


def _traced(tree: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def concatenated(parts: Sequence[Any]) -> Any:
    """Returns the readings of several groups of equations as one."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *on_this_mesh(parts))
