"""Measurements of straight-line code, turned into readings for many equations at once.

XLA compiles one operation on a vector much faster than the same operation on a hundred scalars. So
an equation only contributes a few scalars when it runs; what follows from them, and from the flags
of what it read, is computed for a whole basic block together. Until then flags are references.
"""

from __future__ import annotations

import abc
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

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

    A reading is a pytree of arrays with one element per equation. A flag is a bool that an equation
    gets from what it reads, such as "an operand holds a NaN".
    """

    unread: Any
    """The reading of an equation that has not run, as scalars."""

    flags: int = 0
    """The number of flags of a value."""

    @abc.abstractmethod
    def measure(self, run: EquationRun) -> Any:
        """Returns a few numbers about one run of an equation, as a pytree."""

    def flags_of(self, array: Any) -> list[Any]:
        """Returns the flags of an array that no measured equation made."""
        return []

    def flags_made(self, measured: Any) -> Any:
        """Returns the flags of what equations made, a row each, given what was measured of each."""
        return None

    @abc.abstractmethod
    def settle(self, measured: Any, held: Any, ticks: Any) -> Any:
        """Returns the readings of equations that have each run once.

        Args:
            measured: What was measured, an element per equation.
            held: The flags of what they read, a row per equation; None if there are none.
            ticks: The number of equations that ran before each.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """Returns the readings of two runs of the same equations, ``first`` the earlier."""

    def nothing(self, count: int) -> Any:
        """Returns the readings of equations that have not run."""
        return jax.tree.map(lambda x: jnp.full(count, x), self.unread)


class Given:
    """An array that no measured equation made, an input or a constant: a block of one value."""

    def __init__(self, probe: Probe, array: Any) -> None:
        self._probe = probe
        self._array = array

    @functools.cached_property
    def flags(self) -> Any:
        """Its flags, as the one row of an array. Most arrays are never asked for them."""
        with on_mesh_of(self._array):
            flags = self._probe.flags_of(self._array)
        flags = on_this_mesh(flags)
        return (jnp if _traced(flags) else np).array([flags], bool)


class FlagRef(NamedTuple):
    """Refers to the flags of what one equation of a basic block made, or of what was given."""

    block: BasicBlock | Given
    position: int = 0


FlagRefs: TypeAlias = frozenset[FlagRef]
"""The flags of a value: a flag is set if it is set in any of these."""


class BasicBlock:
    """Equations that run one after the other, with no loop or branch between them.

    Its flags are known when it has ended, a row for each equation.
    """

    def __init__(self) -> None:
        self.measured: list[Any] = []
        self.reads: list[FlagRefs] = []
        self.flags: Any = None


class Recorder:
    """The readings of a jaxpr so far, in the order of its measured equations.

    Args:
        probe: What is measured.
        tick: The number of measured equations that ran before.
    """

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self._block = BasicBlock()
        # A jaxpr may hold no measured equation, and its readings are arrays all the same.
        self._readings = [probe.nothing(0)]
        self.tick: Any = tick

    @property
    def readings(self) -> Any:
        """The readings of the equations that have run."""
        return concatenated(self._readings)

    def add(self, run: EquationRun, reads: FlagRefs) -> FlagRefs:
        """Measures an equation, and returns the reference to the flags of what it made."""
        self._block.measured.append(self._probe.measure(run))
        self._block.reads.append(reads)
        return frozenset((FlagRef(self._block, len(self._block.reads) - 1),))

    def take(self, readings: Any, tick: Any) -> None:
        """Takes over the readings of what is inside an equation, and how many ran up to there."""
        self._readings.append(readings)
        self.tick = tick

    def settle(self) -> None:
        """Ends a basic block: where a loop or a branch begins, and where the jaxpr ends."""
        block, self._block = self._block, BasicBlock()
        # What was counted on another mesh goes on here.
        self.tick = on_this_mesh(self.tick)
        count = len(block.measured)
        if not count:
            return
        measured = _stacked(block.measured)
        # First the flags that are made here: an equation may read what one before it has made.
        block.flags = self._probe.flags_made(measured)
        held = _held(block.reads, self._probe.flags) if self._probe.flags else None
        # Ticks put the runs of all equations in one order, also over the iterations of a loop: a
        # fault of an earlier iteration comes before one of an earlier equation.
        ticks = self.tick + jnp.arange(count, dtype=jnp.uint32)
        settle = jax.jit(self._probe.settle)
        self.take(settle(measured, held, ticks), self.tick + jnp.uint32(count))


def _stacked(measured: Sequence[Any]) -> Any:
    """Returns what was measured of each equation as arrays with an element per equation."""
    if _traced(measured):
        return jax.tree.map(lambda *xs: jnp.stack(xs), *on_this_mesh(measured))
    # Known numbers come from the device in one transfer. XLA would compile a program with an
    # argument for each of them.
    return jax.tree.map(lambda *xs: np.stack(xs), *jax.device_get(measured))


def _traced(tree: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _held(equations: list[FlagRefs], flags: int) -> Any:
    """Returns the flags of what each equation read, a row per equation."""
    read: dict[BasicBlock | Given, dict[FlagRef, None]] = defaultdict(dict)
    for ref in (ref for reads in equations for ref in reads):
        read[ref.block][ref] = None
    place = {ref: k for k, ref in enumerate(ref for refs in read.values() for ref in refs)}
    edges = [(i, place[ref]) for i, reads in enumerate(equations) for ref in reads]
    if not edges:
        return np.zeros((len(equations), flags), bool)
    # One gather per block that is read, not one per operand.
    rows = [
        block.flags[np.array([ref.position for ref in refs])]
        if isinstance(block, BasicBlock)
        else block.flags
        for block, refs in read.items()
    ]
    readers, sources = np.array(edges).T
    if not _traced(rows):
        # What is known is put together here and now: XLA gets nothing to compile for it.
        held = np.zeros((len(equations), flags), bool)
        np.logical_or.at(held, readers, np.concatenate(rows)[sources])
        return held
    # For each equation the "or" over its operands, as one scatter for all: flags are 0 or 1, and
    # the largest of several is their "or".
    ones = jnp.concatenate(on_this_mesh(rows))[sources].astype(jnp.int32)
    return jax.ops.segment_max(ones, readers, len(equations)) > 0


def concatenated(parts: Sequence[Any]) -> Any:
    """Returns the readings of several groups of equations as one."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *on_this_mesh(parts))
