"""`tune`: the smallest set of operations to keep in float32."""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...arguments import check_function, name_of
from ...interpreters.compat import mark_frames
from ...policies import FP16, CastPolicy, Policy, as_policy
from ...transform import Autocast, autocast
from ..measure.numerics_probe import FLOAT16_OVERFLOW
from ..report.by_dtype import contraction_flops, low_share
from ..report.explain import wrapper_of
from ..report.rows import Row, rows_of
from .batches import Batch, as_batches, different, error_of, outputs_of
from .candidates import Unit, keeping, units_of
from .magnitudes import largest_of
from .progress import Bar
from .search import find_culprits, run_bound
from .search_log import Log, Trial
from .tune_report import Pin, TuneReport

mark_frames(__file__)


class UnreachableError(ValueError):
    """Not even with everything in float32 that could be is the program good enough."""


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
    _check(fn, tolerance, accept, argnums)
    start = FP16 if policy is None else as_policy(policy)
    bar = Bar(progress)
    runs = as_batches(batches)
    _check_range(argnums, runs)
    with bar:
        found = _Search(_fresh(fn), runs, tolerance, accept, start, argnums, bar, log).run()
    if progress is not False:
        print(found)
    return (found.policy, found) if report else found.policy


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns another function, which takes the wrappers of the candidates along when it goes."""
    if not inspect.isfunction(fn):
        return fn

    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return function


class _Search:
    def __init__(
        self,
        fn: Callable[..., Any],
        batches: list[Batch],
        tolerance: float | None,
        accept: Callable[..., Any] | None,
        start: Policy,
        argnums: Any,
        bar: Bar,
        log: Any,
    ) -> None:
        self._fn, self._batches, self._start = fn, batches, start
        self._tolerance, self._accept, self._argnums = tolerance, accept, argnums
        self._bar = bar
        bar.show("looking at the program")
        self._sources: dict[Unit, str] = {}
        for batch in different(batches):
            for unit, source in units_of(fn, start, batch, argnums).items():
                self._sources.setdefault(unit, source)
        self._units = list(self._sources)
        self._log = Log(self._header(), log)
        self._tried: set[frozenset[int]] = set()
        self._culprits = 0

    def run(self) -> TuneReport:
        """Searches, and returns what was found."""
        everything = frozenset(range(len(self._units)))
        before = after = self._try(frozenset())
        pinned: frozenset[int] = frozenset()
        if not before.passed:
            best = self._try(everything) if everything else before
            if not best.passed:
                raise UnreachableError(self._unreachable(best))
            self._bar.show("measuring the ranges of values")
            pinned = frozenset(find_culprits(self._order(), self._passes, self._may_run))
            after = self._try(pinned)
        return self._report(sorted(pinned), before, after)

    def _order(self) -> list[int]:
        """The units with the largest values first: what a float16 cannot hold leads.

        Of those with values of one size the first made them, and the others hand them on.
        """
        largest = self._largest()
        return sorted(range(len(largest)), key=lambda i: -math.frexp(largest[i])[1])

    def _largest(self) -> list[float]:
        return self._log.largest(
            lambda: largest_of(self._fn, self._units, self._batches, self._argnums)
        )

    def _passes(self, pinned: frozenset[int]) -> bool:
        return self._try(pinned).passed

    def _may_run(self, culprits: int) -> bool:
        return len(self._tried) < run_bound(culprits, len(self._units))

    def _try(self, pinned: frozenset[int]) -> Trial:
        self._tried.add(pinned)
        trial = self._log.trials.get(pinned)
        if trial is None:
            self._show(pinned)
            trial = self._log.add(self._measure(tuple(sorted(pinned))))
        return trial

    def _show(self, pinned: frozenset[int]) -> None:
        done = len(self._tried) - 1
        total = max(run_bound(1, len(self._units)), done + 1)
        self._bar.show(f"{len(pinned)} of {len(self._units)} in float32", done, total)

    def _measure(self, pinned: tuple[int, ...]) -> Trial:
        mixed = autocast(self._fn, policy=self._policy(pinned))
        if self._accept is not None:
            return Trial(pinned, _as_bool(self._accept(mixed)), None)
        found = outputs_of(mixed, self._batches, self._argnums)
        pairs = zip(self._exact, found, strict=True)
        error = max(float(error_of(x, y)) for x, y in pairs)
        assert self._tolerance is not None
        return Trial(pinned, error <= self._tolerance, error)

    @functools.cached_property
    def _exact(self) -> list[list[Any]]:
        exact = outputs_of(self._fn, self._batches, self._argnums)
        if not exact[0]:
            raise ValueError(
                f"tolerance={self._tolerance} compares float arrays, and {name_of(self._fn)} "
                "returns none. Return what is to be compared, or pass accept."
            )
        return exact

    def _policy(self, pinned: Sequence[int]) -> Policy:
        return keeping(self._start, [self._units[i] for i in pinned])

    def _unreachable(self, best: Trial) -> str:
        kept = f"all {len(self._units)} operations that {self._start.compute_dtype} lowers"
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

    def _report(self, pinned: Sequence[int], before: Trial, after: Trial) -> TuneReport:
        policy = self._policy(pinned)
        before_rows = self._rows(self._start)
        flops: dict[Unit, int] = defaultdict(int)
        for row in before_rows:
            flops[Unit(row.scope, row.primitive)] += row.flops
        largest = self._largest() if pinned else []
        beyond = self._start.compute_dtype == jnp.float16
        pins = []
        for i in pinned:
            unit = self._units[i]
            why = "range" if beyond and largest[i] >= FLOAT16_OVERFLOW else "search"
            source = self._sources[unit]
            pins.append(Pin(*unit, source, largest[i], why, flops[unit]))
        return TuneReport(
            name=name_of(self._fn),
            policy=policy,
            pinned=tuple(pins),
            units=len(self._units),
            runs=len(self._tried),
            tolerance=self._tolerance,
            error_before=before.error,
            error_after=after.error,
            share_before=low_share(*contraction_flops(before_rows)),
            share_after=low_share(*contraction_flops(self._rows(policy))),
        )

    def _rows(self, policy: Policy) -> list[Row]:
        planned = wrapper_of(self._fn, policy, "tune").planned(*self._batches[0].args)
        return rows_of(planned.plan, policy, planned.call.paths)

    def _header(self) -> dict[str, Any]:
        """What makes two searches the same, as JSON data."""
        return {
            "function": name_of(self._fn),
            "policy": _policy_data(self._start),
            "tolerance": self._tolerance,
            "accept": None if self._accept is None else name_of(self._accept),
            "argnums": list(_positions(self._argnums)),
            "batches": [batch.shapes for batch in self._batches],
            "units": [list(unit) for unit in self._units],
        }


def _policy_data(policy: Policy) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(x) for x in value]
        if isinstance(value, CastPolicy):
            return value.name
        return name_of(value) if callable(value) else str(value)

    fields = ("compute_dtype", "output_dtype", "level", "residuals", "dot_output", "rules",
              "scopes", "scoped_rules")  # fmt: skip
    return {name: plain(getattr(policy, name)) for name in fields}


def _as_bool(accepted: Any) -> bool:
    if isinstance(accepted, bool | np.bool_) or (
        isinstance(accepted, jax.Array) and accepted.shape == () and accepted.dtype == jnp.bool_
    ):
        return bool(accepted)
    raise TypeError(
        f"accept must return a bool, got {accepted!r} of type {type(accepted).__name__}. Return "
        "True if the function that it is given is good enough."
    )


def _check(fn: Any, tolerance: Any, accept: Any, argnums: Any) -> None:
    check_function(fn, "tune", "Pass the function itself, then batches of its arguments.")
    if isinstance(fn, Autocast):
        raise ValueError(
            f"tune got {fn!r}, which autocast has already wrapped, and tries policies itself. Pass "
            "the function that was wrapped, and its policy as policy=."
        )
    if (tolerance is None) == (accept is None):
        given = "neither" if accept is None else "both"
        raise ValueError(
            f"tune needs exactly one of tolerance and accept, got {given}. Write tolerance=0.01, "
            "or accept=function with a function of the function in mixed precision."
        )
    if accept is not None and not callable(accept):
        raise TypeError(
            f"accept must be a function of the function in mixed precision, got {accept!r} of type "
            f"{type(accept).__name__}. For a largest error write tolerance=."
        )
    if tolerance is not None and (
        isinstance(tolerance, bool) or not isinstance(tolerance, int | float | np.number)
    ):
        raise TypeError(
            f"tolerance must be a number, got {tolerance!r} of type {type(tolerance).__name__}. "
            "Write the largest relative error, such as tolerance=0.01."
        )
    if tolerance is not None and not 0 < float(tolerance) < math.inf:
        raise ValueError(
            f"tolerance must be a positive number, got {tolerance}. Write the largest relative "
            "error, such as tolerance=0.01."
        )
    positions = _positions(argnums)
    if argnums is not None and not (
        positions and all(isinstance(i, int) and not isinstance(i, bool) for i in positions)
    ):
        raise TypeError(
            "argnums must be the position of an argument, or several positions, got "
            f"{argnums!r}. Write argnums=0 for the first argument."
        )


def _positions(argnums: Any) -> tuple[Any, ...]:
    if argnums is None:
        return ()
    return tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)


def _check_range(argnums: Any, batches: Sequence[Batch]) -> None:
    count = min(len(batch.args) for batch in batches)
    if not all(-count <= i < count for i in _positions(argnums)):
        raise ValueError(
            f"argnums={argnums!r} must name positional arguments of each batch, which have "
            f"{count}, numbered from 0. Write argnums=0 for the first argument."
        )
