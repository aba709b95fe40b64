"""How large the values are that each operation of the float32 program reads and makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...arguments import is_array
from ...interpreters.compat import fresh_make_jaxpr
from ...scopes import read_mark
from ..measure.batching import Run
from ..measure.evaluator import Walker
from ..measure.measured import is_measured, sites_in
from ..measure.programs import Declared
from .batches import Batch
from .candidates import Unit


def largest_of(
    fn: Callable[..., Any], units: Sequence[Unit], batches: Sequence[Batch], argnums: Any
) -> list[float]:
    """Returns the largest finite magnitude among operands and results of each unit.

    The program runs as `check_numerics` runs it, with one number per equation: with all that
    `check_numerics` counts, a program of 2,000 equations compiles four times as long.

    Args:
        fn: The function in float32.
        units: The units.
        batches: The batches.
        argnums: The arguments to differentiate by, None for the function alone.
    """
    called = fn if argnums is None else jax.value_and_grad(fn, argnums)
    found: dict[Unit, float] = defaultdict(float)
    programs: list[tuple[Batch, Callable[..., Any], list[Unit]]] = []

    def program_for(batch: Batch) -> tuple[Callable[..., Any], list[Unit]]:
        for other, run, sites in programs:
            if batch.calls_like(other) and batch.shapes == other.shapes:
                return run, sites

        def arrays_of(*arrays: Any) -> list[Any]:
            return [x for x in jax.tree.leaves(called(*batch.rebuilt(arrays))) if is_array(x)]

        closed = fresh_make_jaxpr(arrays_of, *batch.arrays)

        def run(*arrays: Any) -> Any:
            return Walker(_Largest()).start(closed, [Declared()], arrays).readings

        sites = [Unit(site.scope, site.primitive) for site in sites_in(closed)]
        programs.append((batch, jax.jit(run), sites))
        return programs[-1][1:]

    for batch in batches:
        run, sites = program_for(batch)
        for unit, value in zip(sites, np.asarray(run(*batch.arrays)), strict=True):
            found[unit] = max(found[unit], float(value))
    return [found[_without_marks(unit)] for unit in units]


def _without_marks(unit: Unit) -> Unit:
    names = [name for name in unit.scope.split("/") if read_mark(name) is None]
    return Unit("/".join(names), unit.primitive)


class _Largest:
    """Measures the largest finite magnitude that an equation reads or makes."""

    flags = 0

    def measure(self, run: Run) -> tuple[Any, ...]:
        arrays = [x for x in (*run.operands[0], *run.results[0]) if is_measured(jax.typeof(x))]
        found = [_largest(x) for x in arrays]
        return (jnp.stack(found).max(),)

    def flags_of(self, array: Any) -> tuple[Any, ...]:
        return ()

    def flags_made(self, measured: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def settle(self, measured: tuple[Any, ...], held: tuple[Any, ...], ticks: Any) -> Any:
        return measured[0]

    def nothing(self, count: int) -> Any:
        return jnp.zeros(count, jnp.float32)

    def merge(self, first: Any, second: Any) -> Any:
        return jnp.maximum(first, second)


@jax.jit
def _largest(x: Any) -> Any:
    magnitude = jnp.abs(x)
    largest = jnp.max(magnitude, where=jnp.isfinite(magnitude), initial=0)
    if largest.dtype.itemsize > 4:  # beyond float32's range counts as the end of that
        largest = jnp.minimum(largest, jnp.finfo(jnp.float32).max)
    return largest.astype(jnp.float32)
