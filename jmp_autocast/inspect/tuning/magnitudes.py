"""How large the values are that each operation of the float32 program reads and makes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...interpreters.compat import fresh_make_jaxpr
from ...scopes import read_mark
from ..measure.basic_blocks import EquationRun, Probe
from ..measure.evaluator import Evaluator
from ..measure.measured import is_measurable, measured_equations
from ..measure.side_by_side import Program
from ..signature import Signature, Traced
from .batches import Batch, arrays_of
from .candidates import Candidate


def largest_of(
    fn: Callable[..., Any], candidates: Sequence[Candidate], batches: Sequence[Batch], argnums: Any
) -> list[float]:
    """Returns the largest finite magnitude among operands and results of each candidate.

    The program runs as `check_numerics` runs it, with one number per equation: with all that
    `check_numerics` counts, a program of 2,000 equations compiles four times as long.

    Args:
        fn: The function in float32.
        candidates: The candidates.
        batches: The batches.
        argnums: The arguments to differentiate by, None for the function alone.
    """
    called = arrays_of(fn, argnums)
    found: dict[Candidate, float] = defaultdict(float)

    @functools.partial(jax.jit, static_argnums=0)
    def run(signature: Signature, *arrays: Any) -> Traced:
        closed = fresh_make_jaxpr(functools.partial(called, signature), *arrays)
        evaluated = Evaluator(_Largest()).start(closed, [Program()], arrays)
        made = tuple(Candidate(e.scope, e.primitive) for e in measured_equations(closed))
        return Traced(evaluated.readings, made)

    # The largest of all batches: one batch that overflows is enough.
    for batch in batches:
        measured = run(batch.signature, *batch.arrays)
        for candidate, value in zip(measured.static, np.asarray(measured.arrays), strict=True):
            found[candidate] = max(found[candidate], float(value))
    # Measured equations have no marks of ours in their scopes, and candidates have.
    return [found[_without_marks(candidate)] for candidate in candidates]


def _without_marks(candidate: Candidate) -> Candidate:
    names = [name for name in candidate.scope.split("/") if read_mark(name) is None]
    return Candidate("/".join(names), candidate.primitive)


class _Largest(Probe):
    """Measures the largest finite magnitude that an equation reads or makes."""

    unread = np.float32(0)

    def measure(self, run: EquationRun) -> Any:
        arrays = [x for x in (*run.operands[0], *run.results[0]) if is_measurable(jax.typeof(x))]
        return jnp.stack([_largest(x) for x in arrays]).max()

    def settle(self, measured: Any, held: Any, ticks: Any) -> Any:
        return measured

    def merge(self, first: Any, second: Any) -> Any:
        return jnp.maximum(first, second)


@jax.jit
def _largest(x: Any) -> Any:
    # An array without elements is not measured: `is_measurable`.
    magnitude = lax.abs(x)
    finite = lax.select(lax.is_finite(magnitude), magnitude, lax.full_like(magnitude, 0))
    largest = lax.reduce_max(finite, range(finite.ndim))
    if largest.dtype.itemsize > 4:  # beyond float32's range counts as the end of that
        largest = jnp.minimum(largest, jnp.finfo(jnp.float32).max)
    return largest.astype(jnp.float32)
