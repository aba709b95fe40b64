"""`TuneReport`: what `tune` keeps in float32, why, and what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ...policies import Policy
from ..export import NOT_EXPORTED, Exported, counted, cut, labeled, scaled, table


@dataclasses.dataclass(frozen=True, slots=True)
class KeptOperation:
    """One operation that `jmp_autocast.tune` keeps in float32.

    Args:
        scope: The names of the scopes that it is in, joined by ``/``; ``""`` for the whole
            program.
        primitive: The primitive's name.
        source: The user's source line of the first such equation.
        largest: The largest finite magnitude that these equations read or make in float32.
        why: ``"range"``: that is more than the compute dtype can hold. ``"search"``: without it
            the program was not good enough.
        flops: The FLOPs of these equations in one call, with loops multiplied by their length.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import FP16, tune
        >>> def model(w, x):
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(x @ w) + 1.0)
        >>> batches = [(jnp.eye(8), jnp.full((2, 8), 500.0))]
        >>> options = dict(tolerance=0.01, progress=False, report=True)
        >>> _, report = tune(model, batches=batches, policy=FP16, **options)
        >>> [(kept.scope, kept.primitive, kept.largest, kept.why) for kept in report.kept]
        [('energy', 'square', 250000.0, 'range')]
    """

    scope: str
    primitive: str
    source: str
    largest: float
    why: str
    flops: int


@dataclasses.dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the curve of cost against error.

    Args:
        kept: How many operations are in float32: the first of `TuneReport.order`.
        cost: What they cost, more than in 16 bits.
        predicted: The relative error, as it is predicted from the operations that are left.
        measured: The error of a run of them; None where there was none.

    Example:
        >>> CurvePoint(kept=0, cost=0.0, predicted=0.02, measured=None).kept
        0
    """

    kept: int
    cost: float
    predicted: float
    measured: float | None


@dataclasses.dataclass(frozen=True)
class TuneReport(Exported):
    """What `jmp_autocast.tune` has found, beside the policy.

    Args:
        name: The function's name.
        policy: The policy that was found.
        kept: What it keeps in float32, in the order of the program.
        candidates: The number of operations that could have been kept.
        runs: How many candidates were tried, those in the log included.
        tolerance: The tolerance, None where a callable decided.
        undetermined: The number of arrays that float32 itself does not determine to the tolerance,
            which have only to be finite: 0 where a callable decided.
        error_before: The error of the policy that the search started from, None where a callable
            decided.
        error_after: The error of the policy that was found.
        share_before: The share of the FLOPs of matmuls and convolutions that runs in 16 bits under
            the policy that the search started from.
        share_after: The same under the policy that was found.
        cost: What ``cost=`` was, ``""`` without one; so are the next six empty.
        cost_after: What is kept in float32 costs, more than in 16 bits: seconds or bytes.
        because: Why cost has nothing to choose between, ``""`` where it has.
        unseen: How many operations the prediction does not see: they stand in kernels, in
            derivative rules or in the backward pass, and count as the largest error of the others.
        curve: Cost against predicted error, for each number of operations that are kept.
        order: All operations, the one first that saves the most error for its cost.
        keeping: Returns the policy that keeps operations of the order; see `policy_at`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, tune
        >>> batches = [(jnp.eye(8), jnp.ones((8, 8)))]
        >>> options = dict(policy=BF16, tolerance=0.01, progress=False, report=True)
        >>> policy, report = tune(jnp.matmul, batches=batches, **options)
        >>> policy == BF16, report.runs
        (True, 1)
    """

    name: str
    # The policy has a file format of its own: `Policy.save`.
    policy: Policy = dataclasses.field(metadata=NOT_EXPORTED)
    kept: tuple[KeptOperation, ...]
    candidates: int
    runs: int
    tolerance: float | None
    undetermined: int
    error_before: float | None
    error_after: float | None
    share_before: float
    share_after: float
    cost: str = ""
    cost_after: float = 0.0
    because: str = ""
    unseen: int = 0
    curve: tuple[CurvePoint, ...] = ()
    order: tuple[tuple[str, str], ...] = ()
    keeping: Callable[[Sequence[Any]], Policy] | None = dataclasses.field(
        default=None, metadata=NOT_EXPORTED
    )

    def policy_at(self, kept: int) -> Policy:
        """Returns the policy of a point of the curve.

        Args:
            kept: How many operations it keeps in float32.

        Raises:
            ValueError: There is no curve, or no such point of it.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, tune
            >>> x = jnp.full((8, 8), 0.3)
            >>> options = dict(policy=BF16, tolerance=1e-5, cost="kept", progress=False)
            >>> _, report = tune(jnp.matmul, x, x, report=True, **options)
            >>> report.policy_at(0) == BF16
            True
        """
        if self.keeping is None or not 0 <= kept < len(self.curve):
            has = f"0 to {len(self.curve) - 1}" if self.curve else "no points"
            raise ValueError(
                f"kept={kept!r} must be a point of the curve, which has {has}. Pass cost= to tune "
                "to have a curve where the start does not meet the tolerance."
            )
        return self.keeping(self.order[:kept])

    @property
    def summary(self) -> str:
        """The result in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, tune
            >>> batches = [(jnp.eye(8), jnp.ones((8, 8)))]
            >>> options = dict(policy=BF16, tolerance=0.01, progress=False, report=True)
            >>> tune(jnp.matmul, batches=batches, **options)[1].summary
            'matmul: 0 of 1 operation in float32, 1 run'
        """
        kept = f"{len(self.kept)} of {counted(self.candidates, 'operation')}"
        return cut(f"{self.name}: {kept} in float32, {counted(self.runs, 'run')}")

    def _facts(self) -> dict[str, str | None]:
        error = left_out = None
        if self.error_before is not None:
            error = f"{self.error_before:.3g} before, {self.error_after:.3g} now, "
            error += f"tolerance {self.tolerance:g}"
        if self.undetermined:
            left_out = (
                f"{counted(self.undetermined, 'array')}, of which float32 knows too few digits"
            )
        flops = f"of matmuls and convolutions in {self.policy.compute_dtype}: "
        flops += f"{100 * self.share_before:.1f} % before, {100 * self.share_after:.1f} % now"
        facts = {"error": error, "left out": left_out, "FLOPs": flops}
        if self.curve:
            unit = "seconds" if self.cost == "time" else "bytes"
            most = self.curve[-1].cost
            facts["cost"] = f"{self.cost_after:.3g} of {most:.3g} {unit} that 16 bits save"
        if self.unseen:
            what = f"{counted(self.unseen, 'operation')} in kernels, rules or the backward pass"
            facts["not predicted"] = what
        return facts | {"no gain": self.because or None}

    def __str__(self) -> str:
        """Returns the result in a line, the cost, and a table of what is kept in float32."""
        lines = [self.summary, *labeled(self._facts())]
        if self.curve:
            points = [p for p in self.curve if p.measured is not None or p.kept % 10 == 0]
            columns = {"kept": ">5", "cost": ">10.3g", "predicted": ">10.2g", "measured": ""}
            lines += ["", *table(columns, points, _point, _POINTS)]
        if self.kept:
            columns = {"largest": ">9.3g", "FLOPs": ">7", "why": "7", "operation": "20"}
            lines += ["", *table({**columns, "scope, source": ""}, self.kept, _cells)]
        return "\n".join(lines)


_POINTS = 20


def _point(point: CurvePoint) -> list[Any]:
    measured = "" if point.measured is None else f"{point.measured:.2g}"
    return [point.kept, point.cost, point.predicted, measured]


def _cells(operation: KeptOperation) -> list[Any]:
    where = f"{operation.scope or '(everywhere)'}, {operation.source}"
    return [operation.largest, scaled(operation.flops), operation.why, operation.primitive, where]
