"""Measurements of straight-line code, turned into readings for many equations at once.

XLA compiles one operation on a vector much faster than the same operation on a hundred scalars. So
an equation only contributes a few scalars when it runs; what follows from them, and from the flags
of what it read, is computed for a whole basic block together. Until then flags are references.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


class EquationRun(NamedTuple):
    """One equation that has just run, in all programs.

    Args:
        eqn: The equation.
        operands: Its operands, per program.
        results: Its results, per program.
        again: Runs the equation once more in one program: takes the program's number and operands.
    """

    eqn: Any
    operands: list[list[Any]]
    results: list[list[Any]]
    again: Any


class Probe(Protocol):
    """What is measured of an equation, and how measurements of many equations become readings.

    A reading is a pytree of arrays with one element per equation. A flag is a bool that an equation
    gets from what it reads, such as "an operand holds a NaN".
    """

    flags: int = 0
    """The number of flags of a value."""

    def measure(self, run: EquationRun) -> Any:
        """Returns a few numbers about one run of an equation, as a pytree."""
        ...

    def flags_of(self, array: Any) -> tuple[Any, ...]:
        """Returns the flags of an array that no measured equation made."""
        return ()

    def flags_made(self, measured: Any) -> tuple[Any, ...]:
        """Returns the flags of what equations made, given what was measured of each."""
        return ()

    def settle(self, measured: Any, held: tuple[Any, ...], ticks: Any) -> Any:
        """Returns the readings of equations that have each run once.

        Args:
            measured: What was measured, an element per equation.
            held: The flags of what they read, an element per equation.
            ticks: The number of equations that ran before each.
        """
        ...

    def nothing(self, count: int) -> Any:
        """Returns the readings of equations that have not run."""
        ...

    def merge(self, first: Any, second: Any) -> Any:
        """Returns the readings of two runs of the same equations, ``first`` the earlier."""
        ...


class Made(NamedTuple):
    """Refers to the flags of what one equation of a basic block made."""

    block: BasicBlock
    position: int


class Given:
    """Refers to the flags of an array that no measured equation made: an input or a constant."""

    def __init__(self, array: Any) -> None:
        self.array = array


FlagRefs: TypeAlias = frozenset[Made | Given]
"""The flags of a value: a flag is set if it is set in any of these."""


class BasicBlock:
    """Equations that run one after the other, with no loop or branch between them.

    Args:
        probe: What is measured.
        tick: The number of equations that ran before.
    """

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self._tick = tick
        self._measured: list[Any] = []
        self._reads: list[FlagRefs] = []
        self.flags: tuple[Any, ...] = ()

    def add(self, run: EquationRun, reads: FlagRefs) -> FlagRefs:
        """Measures an equation, and returns the reference to the flags of what it made."""
        self._measured.append(self._probe.measure(run))
        self._reads.append(reads)
        return frozenset((Made(self, len(self._measured) - 1),))

    def settle(self) -> tuple[Any, Any]:
        """Returns the readings of the equations, and the number that ran up to here."""
        count = len(self._measured)
        if not count:
            return self._probe.nothing(0), self._tick
        measured = jax.tree.map(lambda *xs: jnp.stack(xs), *self._measured)
        # First the flags that are made here: an equation may read what one before it has made.
        self.flags = self._probe.flags_made(measured)
        held = self._held() if self._probe.flags else ()
        ticks = self._tick + jnp.arange(count, dtype=jnp.uint32)
        return self._probe.settle(measured, held, ticks), self._tick + jnp.uint32(count)

    def _held(self) -> tuple[Any, ...]:
        """Returns the flags of what each equation read."""
        refs = list(dict.fromkeys(ref for reads in self._reads for ref in reads))
        place = {ref: k for k, ref in enumerate(refs)}
        edges = [(i, place[ref]) for i, reads in enumerate(self._reads) for ref in reads]
        count = len(self._reads)
        if not edges:
            return tuple(jnp.zeros(count, bool) for _ in range(self._probe.flags))
        # For each equation the "or" over its operands, as one scatter for the whole block.
        readers, sources = (np.array(each) for each in zip(*edges, strict=True))
        given = {ref: self._probe.flags_of(ref.array) for ref in refs if isinstance(ref, Given)}
        held = []
        for k in range(self._probe.flags):
            values = _looked_up(refs, {ref: flags[k] for ref, flags in given.items()}, k)
            most = jax.ops.segment_max(values[sources].astype(jnp.int32), readers, count)
            held.append(most > 0)
        return tuple(held)


def _looked_up(refs: Sequence[Made | Given], given: dict[Given, Any], k: int) -> Any:
    """Returns flag ``k`` of each reference: one gather per basic block that is referred to."""
    made: dict[BasicBlock, list[tuple[int, int]]] = defaultdict(list)
    for i, ref in enumerate(refs):
        if isinstance(ref, Made):
            made[ref.block].append((i, ref.position))
    parts = [block.flags[k][np.array([at for _, at in pairs])] for block, pairs in made.items()]
    order = [i for pairs in made.values() for i, _ in pairs]
    if given:
        parts.append(jnp.stack([jnp.asarray(flag, bool) for flag in given.values()]))
        order += [i for i, ref in enumerate(refs) if isinstance(ref, Given)]
    return jnp.concatenate(parts)[np.argsort(order)]


def union(refs: Iterable[FlagRefs]) -> FlagRefs:
    """Returns the flags of a value that is computed from, or moved from, values with these."""
    return frozenset().union(*refs)
