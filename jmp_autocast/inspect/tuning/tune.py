"""`tune`: the smallest set of operations to keep in float32."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import jax.numpy as jnp

from ...arguments import name_of
from ...interpreters.compat import mark_frames
from ...interpreters.plan.walk import walk_plan
from ...policies import FP16, CastPolicy, Policy, as_policy
from ...transform import autocast
from ..measure.numerics_probe import FLOAT16_OVERFLOW
from ..report.by_dtype import contraction_flops, low_share
from ..report.explain import wrapper_of
from ..report.rows import Row, rows_of
from .batches import Batch, as_batches, different, error_of, outputs_of
from .candidates import Candidate, candidates_of, keeping
from .checks import as_bool, check, check_range, positions_of
from .magnitudes import largest_of
from .progress import Progress
from .search import find_culprits, run_bound
from .search_log import Log, Trial
from .tune_report import KeptOperation, TuneReport

mark_frames(__file__)


class UnreachableError(ValueError):
    """The program is not good enough even if all that the policy lowers runs in float32."""


@overload
def tune(
    fn: Callable[..., Any],
    batches: Iterable[tuple[Any, ...]],
    *,
    tolerance: float | None = ...,
    accept: Callable[[Callable[..., Any]], Any] | None = ...,
    policy: Any = ...,
    argnums: int | Sequence[int] | None = ...,
    log: Any = ...,
    progress: bool | None = ...,
    report: Literal[False] = ...,
) -> Policy: ...
@overload
def tune(
    fn: Callable[..., Any],
    batches: Iterable[tuple[Any, ...]],
    *,
    tolerance: float | None = ...,
    accept: Callable[[Callable[..., Any]], Any] | None = ...,
    policy: Any = ...,
    argnums: int | Sequence[int] | None = ...,
    log: Any = ...,
    progress: bool | None = ...,
    report: Literal[True],
) -> tuple[Policy, TuneReport]: ...
def tune(
    fn: Callable[..., Any],
    batches: Iterable[tuple[Any, ...]],
    *,
    tolerance: float | None = None,
    accept: Callable[[Callable[..., Any]], Any] | None = None,
    policy: Any = None,
    argnums: int | Sequence[int] | None = None,
    log: Any = None,
    progress: bool | None = None,
    report: bool = False,
) -> Any:
    """Finds the smallest set of operations to keep in float32, and returns the policy that does.

    What is kept is a primitive in a scope, also inside loops, branches and calls: the finer the
    ``jax.named_scope`` names of a program, the less is kept that need not be. Flax Linen and Haiku
    name their modules by themselves; without names a primitive is kept everywhere.

    The function is run once as it is, in float32. Then candidates are run: with nothing kept, with
    everything, and by delta debugging with less and less, where operations with the largest values
    are suspected first. With ``k`` operations to find among ``n``, that takes at most ``2 * k *
    log2(n) + 10`` runs, each of which is compiled anew. The same call does the same runs.

    Args:
        fn: The function in float32.
        batches: Tuples of arguments to run it on, with values that are typical of it.
        tolerance: The largest relative error (in the L2 norm, of the worst output array and batch)
            against the float32 function. What is not finite there, but is here, is too much.
        accept: Instead of a tolerance: a function of the function in mixed precision that says
            whether it is good enough, for example after it has trained for some steps. The
            ``policy`` of what it gets is the candidate.
        policy: Where to start, as for `autocast`; None for float16.
        argnums: The arguments to differentiate ``fn``, a scalar function, by: the gradients count
            as outputs, and what overflows in the backward pass is found.
        log: A file for what has been tried. A call with the log of one that was stopped goes on
            where that was.
        progress: Whether to show a progress bar, and at the end what is kept and why. None for a
            progress bar in terminals if rich is installed, and False to print nothing.
        report: Return a `TuneReport` as well.

    Returns:
        The policy, for ``autocast(fn, policy=policy)`` and ``policy.save(path)``. With ``report``
        a pair of it and the report.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Not exactly one of ``tolerance`` and ``accept`` is given, ``fn`` has been
            wrapped by `autocast`, not even with everything in float32 is the result good enough,
            or the log is another program's.
        ImportError: ``progress`` is True, and rich is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast, tune
        >>> def model(params, x):
        ...     with jax.named_scope("dense"):
        ...         h = x @ params["w"]
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(h) + 1.0)
        >>> params, x = {"w": jnp.eye(4)}, jnp.full((2, 4), 500.0)
        >>> policy = tune(model, [(params, x)], tolerance=0.01, progress=False)
        >>> policy.scoped_rules
        (('energy', 'square', <CastPolicy.FP32: 'fp32'>),)
        >>> bool(jnp.isfinite(autocast(model, policy=policy)(params, x)).all())
        True
    """
    check(fn, tolerance, accept, argnums)
    start = FP16 if policy is None else as_policy(policy)
    progress_bar = Progress(progress)
    runs = as_batches(batches)
    check_range(argnums, runs)
    with progress_bar:
        search = _Search(_fresh(fn), runs, tolerance, accept, start, argnums, progress_bar, log)
        found = search.run()
    if progress is not False:
        print(found)
    return (found.policy, found) if report else found.policy


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns another function around the user's.

    The wrappers of all the policies that are tried live in its ``__dict__``, as `autocast` keeps
    them, and go when it goes; in that of the user's function they would stay.
    """
    if not inspect.isfunction(fn):
        return fn

    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return function


class _Search:
    """One search: what is tried, and what was found.

    A set of candidates, those that a trial keeps in float32, is a set of their indices.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        batches: list[Batch],
        tolerance: float | None,
        accept: Callable[..., Any] | None,
        start: Policy,
        argnums: Any,
        progress: Progress,
        log: Any,
    ) -> None:
        self._fn, self._batches, self._start = fn, batches, start
        self._tolerance, self._accept, self._argnums = tolerance, accept, argnums
        self._progress = progress
        progress.show("looking at the program")
        self._sources: dict[Candidate, str] = {}
        for batch in different(batches):
            for candidate, source in candidates_of(fn, start, batch, argnums).items():
                self._sources.setdefault(candidate, source)
        self._candidates = list(self._sources)
        self._log = Log(self._header(), log)
        self._tried: set[frozenset[int]] = set()

    def run(self) -> TuneReport:
        """Searches, and returns what was found."""
        everything = frozenset(range(len(self._candidates)))
        before = after = self._try(frozenset())
        kept: frozenset[int] = frozenset()
        if not before.passed:
            best = self._try(everything) if everything else before
            if not best.passed:
                raise UnreachableError(self._unreachable(best))
            self._progress.show("measuring the ranges of values")
            kept = frozenset(find_culprits(self._order(), self._passes, self._may_run))
            after = self._try(kept)
        return self._report(sorted(kept), before, after)

    def _order(self) -> list[int]:
        """Returns the candidates with the largest values first: what float16 cannot hold leads.

        Values are compared by their power of two. Among candidates with equal ones the order of the
        program stays, because the first has made the value, and the others hand it on.
        """
        largest = self._largest()
        return sorted(range(len(largest)), key=lambda i: -math.frexp(largest[i])[1])

    def _largest(self) -> list[float]:
        return self._log.largest(
            lambda: largest_of(self._fn, self._candidates, self._batches, self._argnums)
        )

    def _passes(self, kept: frozenset[int]) -> bool:
        return self._try(kept).passed

    def _may_run(self, culprits: int) -> bool:
        return len(self._tried) < run_bound(culprits, len(self._candidates))

    def _try(self, kept: frozenset[int]) -> Trial:
        self._tried.add(kept)
        trial = self._log.trials.get(kept)
        if trial is None:
            self._show(kept)
            trial = self._log.add(self._measure(tuple(sorted(kept))))
        return trial

    def _show(self, kept: frozenset[int]) -> None:
        done = len(self._tried) - 1
        total = max(run_bound(1, len(self._candidates)), done + 1)
        self._progress.show(f"{len(kept)} of {len(self._candidates)} in float32", done, total)

    def _measure(self, kept: tuple[int, ...]) -> Trial:
        mixed = autocast(self._fn, policy=self._policy(kept))
        if self._accept is not None:
            return Trial(kept, as_bool(self._accept(mixed)), None)
        found = outputs_of(mixed, self._batches, self._argnums)
        error = max(float(error_of(x, y)) for x, y in zip(self._exact, found, strict=True))
        assert self._tolerance is not None
        return Trial(kept, error <= self._tolerance, error)

    @functools.cached_property
    def _exact(self) -> list[list[Any]]:
        exact = outputs_of(self._fn, self._batches, self._argnums)
        if not exact[0]:
            raise ValueError(
                f"tolerance={self._tolerance} compares float arrays, and {name_of(self._fn)} "
                "returns none. Return what is to be compared, or pass accept."
            )
        return exact

    def _policy(self, kept: Iterable[int]) -> Policy:
        return keeping(self._start, [self._candidates[i] for i in kept])

    def _unreachable(self, best: Trial) -> str:
        kept = f"all {len(self._candidates)} operations that {self._start.compute_dtype} lowers"
        if best.error is None:
            return (
                f"accept returns False for {name_of(self._fn)} also with {kept} in float32. Make "
                "sure that it returns True for the float32 function."
            )
        return (
            f"tolerance={self._tolerance:g} is out of reach for {name_of(self._fn)}: with {kept} "
            f"in float32 the error is still {best.error:.3g}. Raise the tolerance, or start from "
            "another policy."
        )

    def _report(self, kept: Sequence[int], before: Trial, after: Trial) -> TuneReport:
        policy = self._policy(kept)
        before_rows = self._rows(self._start)
        flops: Counter[Candidate] = Counter()
        for row in before_rows:
            flops[Candidate(row.scope, row.primitive)] += row.flops
        largest = self._largest() if kept else []
        return TuneReport(
            name=name_of(self._fn),
            policy=policy,
            kept=tuple(self._operation(i, largest[i], flops) for i in kept),
            candidates=len(self._candidates),
            runs=len(self._tried),
            tolerance=self._tolerance,
            error_before=before.error,
            error_after=after.error,
            share_before=low_share(*contraction_flops(before_rows)),
            share_after=low_share(*contraction_flops(self._rows(policy))),
        )

    def _operation(self, i: int, largest: float, flops: Mapping[Candidate, int]) -> KeptOperation:
        candidate = self._candidates[i]
        # bfloat16 has float32's range: there it is never the range that a value is too large for.
        beyond = self._start.compute_dtype == jnp.float16 and largest >= FLOAT16_OVERFLOW
        why: Literal["range", "search"] = "range" if beyond else "search"
        return KeptOperation(*candidate, self._sources[candidate], largest, why, flops[candidate])

    def _rows(self, policy: Policy) -> list[Row]:
        planned = wrapper_of(self._fn, policy, "tune").planned(*self._batches[0].args)
        return rows_of(walk_plan(planned.plan, planned.call.paths), policy)

    def _header(self) -> dict[str, Any]:
        """Returns what makes two searches the same, as JSON data."""
        return {
            "function": name_of(self._fn),
            "policy": _policy_data(self._start),
            "tolerance": self._tolerance,
            "accept": None if self._accept is None else name_of(self._accept),
            "argnums": list(positions_of(self._argnums)),
            "batches": [batch.shapes for batch in self._batches],
            "candidates": [list(candidate) for candidate in self._candidates],
        }


def _policy_data(policy: Policy) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(x) for x in value]
        if isinstance(value, CastPolicy):
            return value.name
        return name_of(value) if callable(value) else str(value)

    return {f.name: plain(getattr(policy, f.name)) for f in dataclasses.fields(policy)}
