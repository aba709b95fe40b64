"""What keeping each candidate in float32 saves of the error, and what it costs: a ranking.

The error is predicted from one backward pass, as `explain_effects` does it: of the outputs' random
sum, whose mean square is the square of the relative error. The cost of a candidate is what lowering
it saves: seconds at best, or bytes of results.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...backend import default_device
from ...devices import Device, as_device, device_of_kind
from ...formats import parse
from ...interpreters.compat import fresh_make_jaxpr
from ...interpreters.primitives.traits import having
from ...policies import CONTRACTIONS, FLOAT32
from ..effects.sites import Found, Site, sites_of
from ..effects.walk import NUMBERS, Tapped
from ..report.rows import Row
from ..report.totals import is_low, item_size
from ..signature import Signature
from .batches import Batch, arrays_of
from .candidates import Candidate

Cost = Literal["time", "kept"]
_MOVES = having("same")


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Candidates, the one first that saves the most error for its cost.

    Args:
        order: Their indices.
        errors: The predicted relative error of each, when it alone is lowered, by index: infinite
            where the dtype does not hold its values.
        costs: What each costs in float32, more than lowered, by index: seconds or bytes.
    """

    order: tuple[int, ...]
    errors: tuple[float, ...]
    costs: tuple[float, ...]

    def error(self, count: int) -> float:
        """Returns the predicted error with the first ``count`` of the order in float32."""
        left = [self.errors[i] for i in self.order[count:]]
        return math.inf if math.inf in left else math.sqrt(math.fsum(x * x for x in left))

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
    """Returns the ranking of candidates with these errors and costs."""

    def worth(i: int) -> tuple[float, int]:
        # The squares add up, so that a square is what is saved. What costs nothing comes first.
        saved = errors[i] ** 2 if math.isfinite(errors[i]) else math.inf
        return -(saved / costs[i] if costs[i] else math.inf if saved else 0.0), i

    order = tuple(sorted(range(len(errors)), key=worth))
    return Ranking(order, tuple(errors), tuple(costs))


def errors_of(
    fn: Callable[..., Any], candidates: Sequence[Candidate], batches: Sequence[Batch], dtype: str
) -> list[float]:
    """Returns the relative error that lowering each candidate alone makes, as it is predicted.

    Args:
        fn: The function in float32.
        candidates: The candidates.
        batches: The batches: the worst counts.
        dtype: The name of the dtype that they are lowered to.
    """
    position = {candidate: i for i, candidate in enumerate(candidates)}
    worst = np.zeros(len(candidates))
    programs: dict[Any, tuple[Any, list[int]]] = {}
    for batch in batches:
        key = batch.signature, batch.shapes
        if key not in programs:
            programs[key] = _program(fn, batch.signature, batch, position, dtype)
        run, owners = programs[key]
        squares = np.zeros(len(candidates))
        for owner, (_, square, lost) in zip(owners, np.asarray(run(*batch.arrays)), strict=True):
            squares[owner] += math.inf if lost else float(square)
        worst = np.maximum(worst, np.sqrt(squares))
    return worst.tolist()


def _program(
    fn: Callable[..., Any],
    signature: Signature,
    batch: Batch,
    position: Mapping[Candidate, int],
    dtype: str,
) -> tuple[Callable[..., Any], list[int]]:
    """Returns a compiled pass that gives the numbers of each site, and each site's candidate."""
    called = arrays_of(fn, None)
    closed = fresh_make_jaxpr(lambda *xs: called(signature, *xs), *batch.arrays)
    live = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in batch.arrays]

    def of_site(site: Site) -> int | None:
        return position.get(Candidate(site.equation.scope, site.equation.primitive))

    sites = sites_of(closed, live, Found(), constants=True).where(
        lambda site: of_site(site) is not None
    )
    owners = [of_site(site) for site in sites.each()]
    walk = Tapped([parse(dtype)])

    def run(*arrays: Any) -> Any:
        def scalar(zeros: Any) -> Any:
            outputs = walk.run(closed, sites, arrays, zeros)
            floats = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.floating)]
            keys = jax.random.split(jax.random.key(0), max(len(floats), 1))
            return sum((_sum(*pair) for pair in zip(keys, floats, strict=False)), jnp.float32(0))

        zeros = sites.tree(lambda site: jnp.zeros((*site.loops, 1, NUMBERS)))
        leaves = jax.tree.leaves(jax.grad(scalar)(zeros))
        return jnp.stack([x.reshape(-1, NUMBERS).sum(0) for x in leaves] or [jnp.zeros(NUMBERS)])

    if not owners:
        return lambda *_: np.zeros((0, NUMBERS)), []
    return jax.jit(run), [owner for owner in owners if owner is not None]


def _sum(key: Any, x: Any) -> Any:
    """Returns a random sum of an array, in units of its norm, which is not differentiated."""
    x = x.astype(jnp.float32)
    norm = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(x * x)))
    signs = jax.random.rademacher(key, x.shape, jnp.float32)
    return jnp.sum(jnp.where(jnp.isfinite(x), x * signs, 0.0)) / jnp.where(norm > 0, norm, 1.0)


def costs_of(
    rows: Sequence[Row], candidates: Sequence[Candidate], cost: Cost, device: Any
) -> list[float]:
    """Returns what each candidate costs in float32, more than lowered.

    Args:
        rows: The rows of the program's report under the policy that lowers them all.
        candidates: The candidates.
        cost: What counts.
        device: The device whose rates count, as `explain` takes it; None for the default one.

    Raises:
        ValueError: The rates of the device are not known.
    """
    rates = _rates(device) if cost == "time" else None
    saved: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        if cost == "time":
            assert rates is not None
            saved[row.scope, row.primitive] += _seconds(row, rates, 4) - _seconds(row, rates, None)
        elif row.primitive not in _MOVES:
            saved[row.scope, row.primitive] += _nbytes(row)
    return [max(saved[candidate], 0.0) for candidate in candidates]


def _rates(device: Any) -> Device:
    kind = default_device().kind
    found = device_of_kind(kind) if device is None else as_device(device)
    if found is None or found.memory is None:
        name = kind if found is None else found.name
        raise ValueError(
            f"cost='time' needs the rates of a device, and those of {name!r} are not known. Name "
            "one, such as device='H100' or device='TPU v5p', or write cost='kept'."
        )
    return found


def _nbytes(row: Row) -> float:
    """Returns how many bytes less its results have than in float32."""
    pairs = zip(row.results, row.result_shapes, strict=True)
    saved = [(4 - item_size(x)) * math.prod(shape) for x, shape in pairs if is_low(x, FLOAT32)]
    return float(row.times * sum(saved))


def _seconds(row: Row, device: Device, item: int | None) -> float:
    """Returns how long an equation takes at best, in its dtypes or with floats of some bytes."""
    names = (*row.operands, *row.results)
    shapes = (*row.operand_shapes, *row.result_shapes)
    low = any(is_low(name, FLOAT32) for name in row.operands[:2]) and item is None
    sizes = [item if item and is_low(name, FLOAT32) else item_size(name) for name in names]
    nbytes = row.times * sum(n * math.prod(x) for n, x in zip(sizes, shapes, strict=True))
    assert device.memory is not None
    full = device.default
    assert full is not None
    if row.primitive not in CONTRACTIONS:
        return nbytes / device.memory
    return max(
        row.flops / (device.rate(device.low) or full if low else full), nbytes / device.memory
    )
