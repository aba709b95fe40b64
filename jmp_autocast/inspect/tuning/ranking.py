"""What keeping each candidate in float32 saves of the error, and what it costs: a ranking.

The error is predicted from one backward pass, as `explain_effects` does it: of the outputs' random
sum, whose mean square is the square of the relative error. The cost of a candidate is what lowering
it saves: seconds at best, or bytes that are kept for the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...backend import default_device
from ...devices import Device, as_device, device_of_kind
from ...interpreters.compat import fresh_make_jaxpr
from ...policies import FLOAT32
from ..effects.number_format import parse
from ..effects.random_sum import floats_in, random_sum
from ..effects.sites import Found, Site, sites_of
from ..effects.walk import NUMBERS, tapped
from ..report.kept import KeptArray
from ..report.roofline import seconds_saved
from ..report.rows import Row
from ..report.totals import is_low, item_size
from .batches import Batch, arrays_of
from .candidates import Candidate, without_marks

Cost = Literal["time", "kept"]


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Candidates, the one first that saves the most error for its cost.

    Args:
        order: Their indices.
        errors: The predicted relative error of each, when it alone is lowered, by index: infinite
            where the dtype does not hold its values.
        costs: What each costs in float32, more than lowered, by index: seconds or bytes.
        unseen: How many no prediction sees.
    """

    order: tuple[int, ...]
    errors: tuple[float, ...]
    costs: tuple[float, ...]
    unseen: int

    def error(self, count: int) -> float:
        """Returns the predicted error with the first ``count`` of the order in float32."""
        return math.hypot(*(self.errors[i] for i in self.order[count:]))

    def cost(self, kept: Sequence[int]) -> float:
        """Returns what keeping candidates costs."""
        return math.fsum(self.costs[i] for i in kept)


# How many runs, each of which is compiled, a ranking takes at most; and how many of them follow the
# prediction, before halves are tried.
_RUNS, _GUESSES = 10, 5


def find_cheapest(
    ranking: Ranking, tolerance: float | None, test: Callable[[frozenset[int]], bool]
) -> tuple[int, ...]:
    """Returns candidates that pass together, of those that save the most error for their cost.

    Args:
        ranking: The ranking.
        tolerance: The largest error; None where the test alone knows.
        test: The test of a set of candidates. All together are taken to pass, and none to fail.

    Returns:
        The candidates. What is returned has passed, if the test was monotone or stopped in time.
    """
    known: dict[frozenset[int], bool] = {}

    def passes(kept: Sequence[int]) -> bool:
        key = frozenset(kept)
        if key not in known:
            known[key] = test(key)
        return known[key]

    # That nothing kept fails is one run, and so may be that everything passes.
    left = lambda: _RUNS - 2 - len(known)  # noqa: E731
    bad, good = 0, len(ranking.order)
    while good - bad > 1 and left() > 0:
        size = (bad + good) // 2
        if tolerance is not None and len(known) < _GUESSES:
            sizes = range(bad + 1, good)
            size = next((n for n in sizes if ranking.error(n) <= tolerance), sizes[-1])
        if passes(ranking.order[:size]):
            good = size
        else:
            bad = size
    kept = list(ranking.order[:good])
    # The dearest first: one that saves much for its cost may save more than is needed.
    for i in sorted(kept, key=lambda i: -ranking.costs[i]):
        without = [k for k in kept if k != i]
        if without and ranking.costs[i] and left() > 0 and passes(without):
            kept = without
    return tuple(kept)


def ranked(errors: Sequence[float], costs: Sequence[float]) -> Ranking:
    """Returns the ranking of candidates.

    Args:
        errors: The predicted error of each, NaN where there is none: it counts as the largest that
            is finite, so that it is neither free nor kept before all others.
        costs: What each costs.
    """
    largest = max((x for x in errors if math.isfinite(x)), default=1.0)
    known = [largest if math.isnan(x) else x for x in errors]

    def worth(i: int) -> tuple[float, float, int]:
        # The squares add up, so that a square is what is saved. What costs nothing comes first.
        saved = known[i] ** 2 if math.isfinite(known[i]) else math.inf
        return -(saved / costs[i] if costs[i] else math.inf if saved else 0.0), -saved, i

    order = tuple(sorted(range(len(known)), key=worth))
    return Ranking(order, tuple(known), tuple(costs), sum(map(math.isnan, errors)))


def errors_of(
    fn: Callable[..., Any], candidates: Sequence[Candidate], batches: Sequence[Batch], dtype: str
) -> list[float]:
    """Returns the relative error that lowering each candidate alone makes, as it is predicted.

    It is NaN for what has no cotangent: an operation in a kernel, or in a derivative rule.

    Args:
        fn: The function in float32.
        candidates: The candidates.
        batches: The batches: the worst counts.
        dtype: The name of the dtype that they are lowered to.
    """
    position = {candidate: i for i, candidate in enumerate(candidates)}
    worst = np.full(len(candidates), np.nan)
    programs: dict[Any, tuple[Any, list[int]]] = {}
    for batch in batches:
        key = batch.signature, batch.shapes
        if key not in programs:
            programs[key] = _program(fn, batch, position, dtype)
        run, owners = programs[key]
        squares = np.full(len(candidates), np.nan)
        for owner, (_, square, lost) in zip(owners, np.asarray(run(*batch.arrays)), strict=True):
            squares[owner] = np.nansum([squares[owner], math.inf if lost else float(square)])
        worst = np.fmax(worst, np.sqrt(squares))
    return worst.tolist()


def _program(
    fn: Callable[..., Any], batch: Batch, position: Mapping[Candidate, int], dtype: str
) -> tuple[Callable[..., Any], list[int]]:
    """Returns a compiled pass that gives the numbers of each site, and each site's candidate."""
    called = arrays_of(fn, None)
    closed = fresh_make_jaxpr(lambda *xs: called(batch.signature, *xs), *batch.arrays)
    live = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in batch.arrays]

    def candidate(site: Site) -> Candidate:
        return Candidate(site.equation.scope, site.equation.primitive)

    every = sites_of(closed, live, Found(), constants=True)
    sites = every.where(lambda site: candidate(site) in position)
    owners = [position[candidate(site)] for site in sites.each()]

    def run(*arrays: Any) -> Any:
        scalar = lambda outputs: (random_sum(floats_in(outputs), together=False), None)  # noqa: E731
        _, found = tapped(closed, sites, [parse(dtype)], arrays, (), scalar)
        return jnp.stack([x.reshape(-1, NUMBERS).sum(0) for x in found])

    if not owners:
        return lambda *_: np.zeros((0, NUMBERS)), []
    return jax.jit(run), owners


def seconds_of(rows: Sequence[Row], candidates: Sequence[Candidate], device: Device) -> list[float]:
    """Returns how much longer each candidate takes in float32 than lowered, at best.

    Args:
        rows: The rows of the program's report under the policy that lowers them all.
        candidates: The candidates.
        device: The device.
    """
    owners = [(row.scope, row.primitive) for row in rows]
    return _sums(candidates, zip(owners, seconds_saved(rows, device), strict=True))


def bytes_of(arrays: Iterable[KeptArray], candidates: Sequence[Candidate]) -> list[float]:
    """Returns how many bytes more each candidate keeps for the backward pass in float32.

    Args:
        arrays: What the program keeps under the policy that lowers them all.
        candidates: The candidates.
    """
    known, saved = {without_marks(each): each for each in candidates}, []
    for array in arrays:
        if is_low(array.dtype, FLOAT32):
            # What is cast is kept for the operation that reads it in 16 bits, in whose scope it is.
            names = (array.primitive, *array.readers)
            owners = (known.get(without_marks(Candidate(array.scope, name))) for name in names)
            owner = next(filter(None, owners), None)
            saved.append((owner, array.nbytes * (4 / item_size(array.dtype) - 1)))
    return _sums(candidates, saved)


def _sums(candidates: Sequence[Candidate], saved: Iterable[tuple[Any, float]]) -> list[float]:
    found: defaultdict[Any, float] = defaultdict(float)
    for owner, amount in saved:
        found[owner] += amount
    return [max(found[candidate], 0.0) for candidate in candidates]


def rates_of(device: Device | str | None) -> Device:
    """Returns the device whose rates count.

    Args:
        device: The device as `explain` takes it; None for the default one.

    Raises:
        ValueError: Its rates are not known.
    """
    kind = default_device().kind
    found = device_of_kind(kind) if device is None else as_device(device)
    if found is None or found.memory is None:
        name = kind if found is None else found.name
        raise ValueError(
            f"cost='time' needs the rates of a device, and those of {name!r} are not known. Name "
            "one, such as device='H100' or device='TPU v5p', or write cost='kept'."
        )
    return found
