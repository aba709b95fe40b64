"""`tune`: the smallest set of operations to keep in float32."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args, overload

import jax.numpy as jnp
import numpy as np

from ...autocast import Autocast, Part, kind_of
from ...call.arguments import name_of
from ...call.options import autocast_options, tool_options
from ...call.switch import VARIABLE, is_switched_off
from ...call.wrapping import wrapper_of
from ...devices import Device, as_device
from ...interpreters.compat import mark_frames
from ...policies import Policy, PolicyLike
from ...policies.choices import check_choice
from ...policies.errors import with_usage
from ..calls import calls_of, check_range, positions_of
from ..measure.numerics_probe import FLOAT16_OVERFLOW
from ..progress_bar import Show, shown_progress
from ..report.roofline import why_no_gain
from ..report.rows import Row
from ..report.totals import contraction_flops
from ..signature import split
from .batches import (
    Batch,
    as_bool,
    check,
    different,
    distances,
    nudged,
    outputs_of,
    worst,
)
from .candidates import candidates_of, keeping, kept_under, largest_of, rows_under
from .ranking import (
    Cost,
    bytes_of,
    errors_of,
    find_cheapest,
    ranked,
    rates_of,
    seconds_of,
)
from .search import find_culprits, run_bound
from .search_log import Log, Trial
from .traced_once import own, traced_once
from .tune_report import CurvePoint, KeptOperation, TuneReport

mark_frames(__file__)


class UnreachableError(ValueError):
    """The program is not good enough even if all that the policy lowers runs in float32."""


_Function: TypeAlias = Callable[..., Any]
_Batches: TypeAlias = Iterable[tuple[Any, ...]]


class _Options(TypedDict, total=False):
    tolerance: float | None
    accept: Callable[[Callable[..., Any]], Any] | None
    policy: PolicyLike | None
    argnums: int | Sequence[int] | None
    log: Any
    progress: bool | None
    cost: Cost | None
    device: Device | str | None
    batches: _Batches | None


@overload
def tune(
    fn: _Function, *args: Any, report: Literal[False] = ..., **options: Unpack[_Options]
) -> Policy: ...
@overload
def tune(
    fn: _Function, *args: Any, report: Literal[True], **options: Unpack[_Options]
) -> tuple[Policy, TuneReport]: ...
@with_usage("tune(fn, params, x, tolerance=0.01), or tune(fn, batches=[(params, x)], ...)")
def tune(
    fn: _Function,
    *args: Any,
    batches: _Batches | None = None,
    tolerance: float | None = None,
    accept: Callable[[Callable[..., Any]], Any] | None = None,
    policy: PolicyLike | None = None,
    argnums: int | Sequence[int] | None = None,
    cost: Cost | None = None,
    device: Device | str | None = None,
    log: Any = None,
    progress: bool | None = None,
    report: bool = False,
) -> Any:
    """Finds a set of operations to keep in float32, and returns the policy that does.

    ``tune`` keeps a primitive in a scope, also inside loops, branches and calls: the finer the
    ``jax.named_scope`` names of a program, the less it keeps unnecessarily. Flax Linen and Haiku
    name their modules by themselves; without names a primitive is kept in the whole program.

    With ``cost`` it keeps what costs least, in at most 10 runs. One backward pass in float32, as
    that of `explain_effects`, predicts the error that lowering each operation makes, and those that
    save the most error for their cost are kept until the prediction meets the tolerance. Runs of
    the program say how many that takes, and which of them, the dearest first, it can do without.

    Without ``cost`` it searches for the fewest. It runs the function once in float32. Then it runs
    candidates: with nothing kept, with everything kept, and then with less and less, where it
    suspects operations with the largest values first. To find ``k`` operations among ``n``, it
    takes at most ``2 * k * log2(n) + 10`` runs. This finds what only the backward pass shows, such
    as gradients that overflow, which no prediction of the outputs does.

    Each run is compiled. The function is traced once for each kind of batch, and again for each run
    with ``accept``. The same call does the same runs.

    Args:
        fn: The function in float32.
        *args: Its arguments, with values that are typical of it.
        batches: Instead of ``args``, for several calls: a tuple of arguments for each.
        tolerance: The largest relative error (in the L2 norm, of the worst output array and batch)
            against the float32 function. A value that is finite only in float32 fails. An array
            that changes by more in float32 if the arguments change by a unit in the last place,
            such as a gradient that is zero but for rounding, has only to be finite.
        accept: Instead of a tolerance: a function that gets the function in mixed precision, and
            returns whether it is good enough, for example after some training steps. The ``policy``
            of its argument is the candidate.
        policy: Where to start, as for `autocast`, which names the default one as well.
        argnums: The arguments to differentiate ``fn``, a scalar function, by: the gradients count
            as outputs, and what overflows in the backward pass is found.
        cost: What an operation costs in float32, more than in 16 bits: ``"time"``, the seconds that
            it takes at best, by the rates of a device; ``"kept"``, the bytes that it keeps for the
            backward pass with ``residuals="recompute"``, as `explain_kept` counts them.
        device: The device whose rates count with ``cost="time"``, as `explain` takes it, such as
            ``"H100"``. None for the default device.
        log: A file that records the trials. A call with the log of a stopped call continues it.
        progress: Whether to show a progress bar, and at the end what is kept and why. None for a
            progress bar in terminals if rich is installed, and False to print nothing.
        report: Return a `TuneReport` as well.

    Returns:
        The policy, for ``autocast(fn, policy=policy)`` and ``policy.save(path)``. With ``report``
        a pair of it and the report.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Not exactly one of ``tolerance`` and ``accept`` is given, ``fn`` has been
            wrapped by `autocast`, the environment turns autocast off, the result is not good enough
            even with everything in float32, or the log is that of another program.
        ImportError: ``progress`` is True, and rich is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import FP16, autocast, tune
        >>> def model(params, x):
        ...     with jax.named_scope("dense"):
        ...         h = x @ params["w"]
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(h) + 1.0)
        >>> params, x = {"w": jnp.eye(8)}, jnp.full((2, 8), 500.0)
        >>> policy = tune(model, params, x, policy=FP16, tolerance=0.01, progress=False)
        >>> policy.scoped_rules
        (('energy', 'square', <CastPolicy.FP32: 'fp32'>),)
        >>> bool(jnp.isfinite(autocast(model, policy=policy)(params, x)).all())
        True
    """
    check(fn, tolerance, accept)
    if is_switched_off():
        raise ValueError(
            f"tune tries what autocast does, and the environment variable {VARIABLE} turns it off. "
            "Unset it."
        )
    options = tool_options(policy)
    start = (options or autocast_options()).chosen[0]
    if cost is not None:
        check_choice("cost", cost, get_args(Cost))
    runs = [Batch(each, *split(each)) for each in calls_of("tune", args, batches)]
    count = min(len(batch.args) for batch in runs)
    check_range(argnums, count, "each batch, which have")
    with shown_progress(progress) as show:
        # What accept does may change what the function closes over.
        kept = own(fn) if accept is not None else traced_once(fn)
        goal = tolerance, accept, cost, device
        found = _Search(kept, runs, *goal, start, argnums, show, log).run()
    if progress is not False:
        print(found)
    return (found.policy, found) if report else found.policy


@dataclasses.dataclass(eq=False)
class _Search:
    """One search: what is tried, and what was found.

    A set of candidates, those that a trial keeps in float32, is a set of their indices.
    """

    fn: Callable[..., Any]
    batches: list[Batch]
    tolerance: float | None
    accept: Callable[..., Any] | None
    cost: Cost | None
    device: Device | str | None
    start: Policy
    argnums: Any
    show: Show
    log_path: Any
    _no_gain: str = ""

    def run(self) -> TuneReport:
        """Searches, and returns what was found."""
        self.show("looking at the program")
        lowered = candidates_of(self.fn, self.start, different(self.batches), self.argnums)
        self._candidates, self._sources = list(lowered), list(lowered.values())
        # What makes two searches the same.
        header = {
            "function": name_of(self.fn),
            "policy": self.start,
            "tolerance": self.tolerance,
            "accept": self.accept,
            "argnums": positions_of(self.argnums),
            "cost": [self.cost, self.device and as_device(self.device).name],
            "batches": [batch.shapes for batch in self.batches],
            "candidates": self._candidates,
        }
        self._log = Log(header, self.log_path)
        self._tried: set[frozenset[int]] = set()
        everything = frozenset(range(len(lowered)))
        # Before anything is compiled: the rates of the device may not be known.
        costs = self._costs()
        before = after = self._try(frozenset())
        kept: frozenset[int] = frozenset()
        largest: list[float] = []
        if not before.passed:
            # The search assumes that everything in float32 passes. Where it does not, no set does,
            # and one run says so.
            best = self._try(everything) if everything else before
            if not best.passed:
                raise UnreachableError(self._unreachable(best))
            if self.cost is not None:
                return self._cheapest(costs, before)
            self.show("measuring the ranges of values")
            largest = self._largest()
            # Values are compared by their power of two. Among candidates with equal ones the order
            # of the program stays: the first has made the value, and the others hand it on.
            order = sorted(everything, key=lambda i: (-math.frexp(largest[i])[1], i))
            culprits = find_culprits(order, lambda kept: self._try(kept).passed, self._may_run)
            kept = frozenset(culprits)
            after = self._try(kept)
        found = self._report(sorted(kept), largest, before, after)
        if self.cost is None:
            return found
        because = self._because(costs, (), before)
        return dataclasses.replace(found, cost=self.cost, because=because)

    def _costs(self) -> list[float]:
        batches = different(self.batches)
        if self.cost == "time":
            device = rates_of(self.device)
            rows = [row for b in batches for row in rows_under(self.fn, self.start, b)]
            self._no_gain = why_no_gain(rows, device)
            return seconds_of(rows, self._candidates, device)
        if self.cost == "kept":
            arrays = [x for b in batches for x in kept_under(self.fn, self.start, b)]
            return bytes_of(arrays, self._candidates)
        return []

    def _because(self, costs: Sequence[float], kept: Sequence[int], before: Trial) -> str:
        """Returns why cost has nothing to choose between, "" where it has."""
        if before.passed:
            return "nothing is kept: what it starts from is good enough"
        if self._no_gain or not any(costs):
            return self._no_gain or "the backward pass keeps nothing in 16 bits"
        if math.fsum(costs[i] for i in kept) < 0.01 * math.fsum(costs):
            return "what is kept costs less than 1 % of what 16 bits save"
        return "every operation is needed" if len(kept) == len(costs) else ""

    def _cheapest(self, costs: Sequence[float], before: Trial) -> TuneReport:
        """Keeps what saves the most error for its cost, and then does without the dearest."""
        self.show("predicting the effect of each operation")
        dtype = str(self.start.compute_dtype)
        ranking = ranked(errors_of(self.fn, self._candidates, self.batches, dtype), costs)
        kept = find_cheapest(ranking, self.tolerance, lambda kept: self._try(kept).passed)
        after = self._try(frozenset(kept))
        found = self._report(sorted(kept), self._largest(), before, after)
        measured = {trial.kept: trial.error for trial in self._log.trials.values()}
        curve = tuple(
            CurvePoint(
                kept=size,
                cost=ranking.cost(ranking.order[:size]),
                predicted=ranking.error(size),
                measured=measured.get(tuple(sorted(ranking.order[:size]))),
            )
            for size in range(len(ranking.order) + 1)
        )
        return dataclasses.replace(
            found,
            cost=str(self.cost),
            cost_after=ranking.cost(kept),
            because=self._because(costs, kept, before),
            unseen=ranking.unseen,
            curve=curve,
            order=tuple(self._candidates[i] for i in ranking.order),
            keeping=functools.partial(keeping, self.start),
        )

    def _largest(self) -> list[float]:
        measure = lambda: largest_of(self.fn, self._candidates, self.batches, self.argnums)  # noqa: E731
        return self._log.largest(measure)

    def _may_run(self, culprits: int) -> bool:
        return len(self._tried) < run_bound(culprits, len(self._candidates))

    def _try(self, kept: frozenset[int]) -> Trial:
        self._tried.add(kept)
        trial = self._log.trials.get(kept)
        if trial is None:
            done, count = len(self._tried) - 1, len(self._candidates)
            # Nobody knows yet how many culprits there are. The bar counts for one, and grows.
            total = max(run_bound(1, count), done + 1)
            self.show(f"{len(kept)} of {count} in float32", done, total)
            trial = self._log.add(self._measure(tuple(sorted(kept))))
        return trial

    def _measure(self, kept: tuple[int, ...]) -> Trial:
        # A new policy is a new program: each trial is traced and compiled anew.
        options = autocast_options(policy=self._policy(kept))
        kind = kind_of(self.fn, self.batches[0].args, {})
        # A scope may be in some batches only, or in a derivative rule alone.
        mixed = wrapper_of(self.fn, options, Part if kind is Autocast else kind)
        if self.accept is not None:
            return Trial(kept, as_bool(self.accept(mixed)), None)
        found = outputs_of(mixed, self.batches, self.argnums)
        batches = zip(self._float32[0], found, self._undetermined, strict=True)
        error = max(worst(distances(x, y), left_out) for x, y, left_out in batches)
        assert self.tolerance is not None
        return Trial(kept, error <= self.tolerance, error)

    @functools.cached_property
    def _undetermined(self) -> list[list[bool]]:
        """Returns which arrays of each batch float32 itself does not determine to the tolerance.

        The gradient of a bias that a softmax removes is an example: it is zero but for rounding. In
        a GPT of one layer that of the key's bias has 1.6e-9 of the norm of all gradients, and
        differs by 1.7e4 times its own norm in bfloat16.
        """
        assert self.tolerance is not None
        found = [
            [float(each.error) > self.tolerance for each in distances(x, y)]
            for x, y in zip(*self._float32, strict=True)
        ]
        # Where float32 determines nothing, nothing is left out: a search that compares no array
        # would accept any policy.
        return [[False for _ in each] if all(each) else each for each in found]

    @functools.cached_property
    def _float32(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns what the float32 function gives, and gives for arguments that are nudged."""
        exact = outputs_of(self.fn, [*self.batches, *map(nudged, self.batches)], self.argnums)
        if not exact[0]:
            raise ValueError(
                f"tolerance={self.tolerance} compares float arrays, and {name_of(self.fn)} "
                "returns none. Return the arrays to compare, or pass accept."
            )
        count = len(self.batches)
        return exact[:count], exact[count:]

    def _policy(self, kept: Iterable[int]) -> Policy:
        return keeping(self.start, [self._candidates[i] for i in kept])

    def _unreachable(self, best: Trial) -> str:
        kept = f"all {len(self._candidates)} operations that {self.start.compute_dtype} lowers"
        if best.error is None:
            return (
                f"accept returns False for {name_of(self.fn)} also with {kept} in float32. Make "
                "sure that it returns True for the float32 function."
            )
        return (
            f"tolerance={self.tolerance:g} is out of reach for {name_of(self.fn)}: with {kept} "
            f"in float32 the error is still {best.error:.3g}. Raise the tolerance, or start from "
            "another policy."
        )

    def _report(
        self, kept: Sequence[int], largest: Sequence[float], before: Trial, after: Trial
    ) -> TuneReport:
        policy, batch = self._policy(kept), self.batches[0]
        at_first, now = (rows_under(self.fn, each, batch) for each in (self.start, policy))
        flops: Counter[tuple[str, str]] = Counter()
        for row in at_first:
            flops[row.scope, row.primitive] += row.flops
        # bfloat16 has float32's range: there it is never the range that a value is too large for.
        limit = FLOAT16_OVERFLOW if self.start.compute_dtype == jnp.float16 else math.inf
        operations = (
            KeptOperation(
                *self._candidates[i],
                source=self._sources[i],
                largest=largest[i],
                why="range" if largest[i] >= limit else "search",
                flops=flops[self._candidates[i]],
            )
            for i in kept
        )
        return TuneReport(
            name=name_of(self.fn),
            policy=policy,
            kept=tuple(operations),
            candidates=len(self._candidates),
            runs=len(self._tried),
            tolerance=self.tolerance,
            undetermined=0 if self.accept is not None else max(map(sum, self._undetermined)),
            error_before=before.error,
            error_after=after.error,
            share_before=_low_share(at_first, policy.wide_dtype),
            share_after=_low_share(now, policy.wide_dtype),
        )


def _low_share(rows: Sequence[Row], wide: np.dtype) -> float:
    total, low, _ = contraction_flops(rows, wide)
    return low / total if total else 1.0
