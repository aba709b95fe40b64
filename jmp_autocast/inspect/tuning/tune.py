"""`tune`: finds the operations that must stay in float32."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...autocast import Autocast, Part, kind_of
from ...call.arguments import name_of
from ...call.options import autocast_options
from ...call.switch import VARIABLE, is_switched_off
from ...call.wrapping import wrapper_of
from ...interpreters.compat import mark_frames
from ...policies import CONTRACTIONS, Policy, PolicyLike
from ...policies.errors import with_usage
from ..calls import calls_of, check_range
from ..effects.predicted import Effect, Pass, pass_of
from ..signature import split
from .batches import Batch, arrays_of, check, distances, nudged, outputs_of, traced_once, worst
from .candidates import candidates_of, keeping, rows_under
from .search import find_needed, run_bound
from .tune_report import KeptOperation, TuneReport

mark_frames(__file__)


class UnreachableError(ValueError):
    """The error is too large even if all operations that the policy lowers run in float32."""


@with_usage("tune(fn, params, x, tolerance=0.01), or tune(fn, batches=[(params, x)], ...)")
def tune(
    fn: Callable[..., Any],
    *args: Any,
    tolerance: float,
    batches: Iterable[tuple[Any, ...]] | None = None,
    policy: PolicyLike | None = None,
    argnums: int | Sequence[int] | None = None,
) -> TuneReport:
    """Finds the operations that must stay in float32, and a policy for them.

    An operation is all equations of one primitive in one scope, also inside loops, branches and
    calls: the finer the ``jax.named_scope`` names of a program, the less stays in float32
    unnecessarily. Flax Linen and Haiku create a scope for each module; without scopes an operation
    is a primitive of the whole program.

    If the error under the first policy exceeds the tolerance, one forward and backward pass in
    float32 predicts how much the rounding of each operation changes the loss, and which operations
    have values or gradients out of the range of 16 bits. Then `tune` runs the program with the
    operations of the largest effects in float32, to find those that are needed, at most
    ``2 * log2(n) + 10`` times for ``n`` operations. Each run is compiled; the function is traced
    once for each kind of batch. The search is deterministic.

    Args:
        fn: The function in float32.
        *args: Its arguments, arrays with typical values.
        tolerance: The largest accepted relative error against the float32 function, in the L2 norm,
            of the worst output array and batch. A value that is finite only in float32 fails. If an
            array changes by more in float32 when the arguments change by a unit in the last place,
            as a gradient that is zero except for rounding does, it only has to be finite.
        batches: Several calls in place of ``args``: a tuple of arguments for each.
        policy: The policy to start from: a `Policy`, a 16-bit dtype or a jmp string; None for the
            default.
        argnums: The positions of arguments, as in ``jax.grad``, if the function returns a scalar:
            its gradients count as outputs, so that the backward pass is checked as well.

    Returns:
        The report: ``report.policy`` for ``autocast(fn, policy=report.policy)``, and a table of the
        operations in float32, with the effect of each.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``tolerance`` is not positive, ``fn`` has been wrapped by `autocast`, the
            environment turns autocast off, or the error exceeds the tolerance even with all
            operations in float32.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import FP16, autocast, tune
        >>> def model(params, x):
        ...     with jax.named_scope("dense"):
        ...         h = x @ params["w"]
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(h) + 1.0) @ params["w"]
        >>> params, x = {"w": jnp.eye(8)}, jnp.full((2, 8), 500.0)
        >>> report = tune(model, params, x, policy=FP16, tolerance=0.01)
        >>> [(kept.scope, kept.primitive, kept.why) for kept in report.kept]
        [('energy', 'square', 'range')]
        >>> bool(jnp.isfinite(autocast(model, policy=report.policy)(params, x)).all())
        True
    """
    check(fn, tolerance)
    if is_switched_off():
        raise ValueError(
            f"tune runs autocast, and the environment variable {VARIABLE} turns it off. Unset it."
        )
    start = autocast_options(policy).chosen[0]
    runs = [Batch(each, *split(each)) for each in calls_of("tune", args, batches)]
    count = min(len(batch.args) for batch in runs)
    check_range(argnums, count, "each batch, which have")
    return _Search(traced_once(fn), runs, float(tolerance), start, argnums).run()


class _Search:
    """One search of `tune`. A set of candidates to keep in float32 is a set of their indices."""

    def __init__(
        self,
        fn: Callable[..., Any],
        batches: list[Batch],
        tolerance: float,
        start: Policy,
        argnums: Any,
    ) -> None:
        self._fn, self._batches, self._tolerance = fn, batches, tolerance
        self._start, self._argnums = start, argnums
        self._lowered = candidates_of(fn, start, batches, argnums)
        # Matmuls and convolutions are last, so that of operations with equal effects they are the
        # ones that stay in 16 bits.
        self._candidates = sorted(self._lowered, key=lambda each: each.primitive in CONTRACTIONS)
        self._errors: dict[frozenset[int], float] = {}
        self._has_loss, self._refused = False, ""

    def run(self) -> TuneReport:
        """Searches, and returns the report."""
        nothing, everything = frozenset[int](), frozenset(range(len(self._candidates)))
        if self._passes(nothing):
            return self._report(nothing, [])
        before = self._errors[nothing]
        # The search needs a set that passes; if everything in float32 fails, there is none.
        if not everything or not self._passes(everything):
            raise UnreachableError(
                f"tolerance={self._tolerance:g} is out of reach for {name_of(self._fn)}: with all "
                f"{len(everything)} operations that {self._start.compute_dtype} lowers in float32 "
                f"the error is still {self._errors[everything]:.3g}. Raise the tolerance, or start "
                "from another policy."
            )
        effects = self._effects()
        # An operation without a prediction is first in the search if the error is infinite, and
        # else last: derivative rules such as that of `relu` round little.
        unseen = math.inf if before == math.inf else 0.0
        sizes = [unseen if each is None else each.size for each in effects]
        bound = run_bound(len(everything))
        may_run = lambda: len(self._errors) < bound  # noqa: E731
        needed = find_needed(sizes, self._tolerance / before, self._passes, may_run)
        return self._report(frozenset(needed), effects)

    def _passes(self, kept: frozenset[int]) -> bool:
        if kept not in self._errors:
            kind = kind_of(self._fn, self._batches[0].args, {})
            # The wrapper class `Part` accepts a rule for a scope that a batch does not have: the
            # scope may be only in other batches, or only in a derivative rule.
            kind = Part if kind is Autocast else kind
            mixed = wrapper_of(self._fn, autocast_options(policy=self._policy(kept)), kind)
            found = outputs_of(mixed, self._batches, self._argnums)
            triples = zip(self._float32[0], found, self._undetermined, strict=True)
            self._errors[kept] = max(worst(distances(x, y), only) for x, y, only in triples)
        return self._errors[kept] <= self._tolerance

    @functools.cached_property
    def _float32(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """The float32 function's results for the batches, and for the batches after `nudged`."""
        nearby = list(map(nudged, self._batches))
        exact = outputs_of(self._fn, [*self._batches, *nearby], self._argnums)
        if not exact[0]:
            raise ValueError(
                f"tolerance={self._tolerance} compares float arrays, and {name_of(self._fn)} "
                "returns none. Return the arrays to compare."
            )
        return exact[: len(nearby)], exact[len(nearby) :]

    @functools.cached_property
    def _undetermined(self) -> list[list[bool]]:
        """For each array of each batch, whether its uncertainty in float32 exceeds the tolerance.

        An example is the gradient of a bias that a softmax cancels: it is zero except for rounding.
        In a GPT of one layer the gradient of the key's bias has 1.6e-9 of the norm of all
        gradients, and its relative error in bfloat16 is 1.7e4.
        """
        found = [
            [float(each.error) > self._tolerance for each in distances(x, y)]
            for x, y in zip(*self._float32, strict=True)
        ]
        # If float32 determines no array, none is left out: a search without arrays would accept any
        # policy.
        return [[False for _ in each] if all(each) else each for each in found]

    def _effects(self) -> list[Effect | None]:
        """Returns for each candidate its largest effect in any batch, None without an effect."""
        called, passes = arrays_of(self._fn, None), dict[Any, Pass]()
        operations = [candidate.operation for candidate in self._candidates]
        dtype, gradients = np.dtype(self._start.compute_dtype), self._argnums is not None
        found: dict[Any, Effect] = {}
        for batch in self._batches:
            if batch.kind not in passes:
                program = functools.partial(called, batch.signature)
                passes[batch.kind] = pass_of(program, batch.arrays, operations, dtype, gradients)
            for operation, effect in passes[batch.kind].effects(batch.arrays).items():
                other = found.get(operation, effect)
                found[operation] = effect if effect.size >= other.size else other
        self._has_loss = all(each.has_loss for each in passes.values())
        self._refused = next((each.error for each in passes.values() if each.error), "")
        return list(map(found.get, operations))

    def _policy(self, kept: Iterable[int]) -> Policy:
        return keeping(self._start, [self._candidates[i] for i in sorted(kept)])

    def _report(self, kept: frozenset[int], effects: Sequence[Effect | None]) -> TuneReport:
        flops: Counter[tuple[str, str]] = Counter()
        for row in rows_under(self._fn, self._start, self._batches[0]):
            flops[row.scope, row.primitive] += row.flops
        rows = [
            KeptOperation(
                *self._candidates[i],
                source=self._lowered[self._candidates[i]],
                worth=None if (effect := effects[i]) is None else effect.size,
                flops=flops[self._candidates[i]],
            )
            for i in sorted(kept)
        ]
        losses = [float(arrays[0]) for arrays in self._float32[0] if self._has_loss]
        return TuneReport(
            name=name_of(self._fn),
            policy=self._policy(kept),
            kept=tuple(sorted(rows, key=lambda row: -(row.worth or 0.0))),
            candidates=len(self._candidates),
            runs=len(self._errors),
            tolerance=self._tolerance,
            loss=sum(losses) / len(losses) if losses else None,
            undetermined=max(map(sum, self._undetermined)),
            unpredicted=sum(effect is None for effect in effects),
            refused=self._refused,
            error_before=self._errors[frozenset()],
            error_after=self._errors[kept],
        )
