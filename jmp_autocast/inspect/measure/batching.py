"""Readings of straight-line code, settled for many equations at once.

XLA compiles a few operations on vectors much faster than the same operations on scalars, once per
equation. What an equation's operands hold is therefore kept as references, and looked up for a
whole block of equations together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


class Run(NamedTuple):
    """One equation that has just run.

    Args:
        eqn: The equation.
        operands: Its operands, per lane.
        results: Its results, per lane.
        again: Runs the equation once more in a lane: takes the lane's number and operands.
    """

    eqn: Any
    operands: list[list[Any]]
    results: list[list[Any]]
    again: Any


class Probe(Protocol):
    """What is measured, and how measurements of many equations become readings.

    A reading is a pytree of arrays with one element per equation. Flags are what a value hands on
    to what is computed from it.
    """

    flags: int
    """The number of flags of a value."""

    def measure(self, run: Run) -> tuple[Any, ...]:
        """Returns a few scalars about one run of an equation."""
        ...

    def flags_of(self, array: Any) -> tuple[Any, ...]:
        """Returns the flags of an array that no measured equation made."""
        ...

    def flags_made(self, measured: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the flags of what equations made, given what was measured of each."""
        ...

    def settle(self, measured: tuple[Any, ...], held: tuple[Any, ...], ticks: Any) -> Any:
        """Returns the readings of equations.

        Args:
            measured: What was measured, an element per equation.
            held: The flags of what they read.
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
    """A reference to the flags of what one equation of a block made."""

    block: Block
    position: int


class Given:
    """A reference to the flags of an array that no measured equation made."""

    def __init__(self, array: Any) -> None:
        self.array = array


Refs: TypeAlias = frozenset[Made | Given]


class Block:
    """Equations that run one after the other, with no loop or branch between them.

    Args:
        probe: What is measured.
        tick: The number of equations that ran before.
    """

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self._tick = tick
        self._measured: list[tuple[Any, ...]] = []
        self._reads: list[Refs] = []
        self.flags: tuple[Any, ...] = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def add(self, run: Run, reads: Refs) -> Refs:
        """Measures an equation, and returns the reference to what it made."""
        self._measured.append(self._probe.measure(run))
        self._reads.append(reads)
        return frozenset((Made(self, len(self._measured) - 1),))

    def settle(self) -> tuple[Any, Any]:
        """Returns the readings of the equations, and the number that ran up to here."""
        count = len(self._measured)
        if not count:
            return self._probe.nothing(0), self._tick
        measured = tuple(jnp.stack(each) for each in zip(*self._measured, strict=True))
        self.flags = self._probe.flags_made(measured)
        # A reference to an equation of this block is looked up in what has just been stacked.
        held = self._held() if self._probe.flags else ()
        ticks = self._tick + jnp.arange(count, dtype=jnp.uint32)
        return self._probe.settle(measured, held, ticks), self._tick + jnp.uint32(count)

    def _held(self) -> tuple[Any, ...]:
        refs = list(dict.fromkeys(ref for reads in self._reads for ref in reads))
        place = {ref: k for k, ref in enumerate(refs)}
        edges = [(i, place[ref]) for i, reads in enumerate(self._reads) for ref in reads]
        count = len(self._reads)
        if not edges:
            return tuple(jnp.zeros(count, bool) for _ in range(self._probe.flags))
        readers, sources = (np.array(each) for each in zip(*edges, strict=True))
        given = {ref: self._probe.flags_of(ref.array) for ref in refs if isinstance(ref, Given)}
        held = []
        for k in range(self._probe.flags):
            values = _looked_up(refs, {ref: flags[k] for ref, flags in given.items()}, k)
            most = jax.ops.segment_max(values[sources].astype(jnp.int32), readers, count)
            held.append(most > 0)
        return tuple(held)


def _looked_up(refs: Sequence[Any], given: dict[Any, Any], k: int) -> Any:
    """Returns flag ``k`` of each reference: one gather per block that is referred to."""
    blocks = dict.fromkeys(ref.block for ref in refs if isinstance(ref, Made))
    parts, order = [], []
    for block in blocks:
        mine = [i for i, ref in enumerate(refs) if isinstance(ref, Made) and ref.block is block]
        parts.append(block.flags[k][np.array([refs[i].position for i in mine])])
        order += mine
    rest = [i for i, ref in enumerate(refs) if isinstance(ref, Given)]
    if rest:
        parts.append(jnp.stack([jnp.asarray(given[refs[i]], bool) for i in rest]))
        order += rest
    return jnp.concatenate(parts)[np.argsort(order)]


def union(refs: Iterable[Refs]) -> Refs:
    """Returns the references of a value that holds nothing but values with these."""
    return frozenset().union(*refs)
