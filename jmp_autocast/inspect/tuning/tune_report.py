"""`TuneReport`: the policy that `tune` found, and what each of its operations is worth."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ...policies import Policy
from ..export import NOT_EXPORTED, Exported, counted, cut, labeled, place, scaled, table


@dataclasses.dataclass(frozen=True, slots=True)
class KeptOperation:
    """One operation that `jmp_autocast.tune` keeps in float32.

    Args:
        scope: The names of the scopes that it is in, joined by ``/``; ``""`` for the whole
            program.
        primitive: The primitive's name.
        source: The user's source line of the first such equation.
        worth: The change of the loss if this operation alone is lowered, to first order; of a
            function without a loss the relative error of its results. Infinite for an operation
            whose values or gradients the compute dtype cannot hold, and None for one that the
            prediction does not see.
        flops: The FLOPs of these equations in one call, with loops multiplied by their length.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import FP16, tune
        >>> def model(w, x):
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(x @ w) + 1.0)
        >>> report = tune(model, jnp.eye(8), jnp.full((2, 8), 500.0), policy=FP16, tolerance=0.01)
        >>> [(kept.scope, kept.primitive, kept.worth, kept.why) for kept in report.kept]
        [('energy', 'square', inf, 'range')]
    """

    _computed: ClassVar[tuple[str, ...]] = ("why",)

    scope: str
    primitive: str
    source: str
    worth: float | None
    flops: int

    @property
    def why(self) -> str:
        """``"range"``, ``"rounding"``, or ``"not seen"`` by the prediction.

        Example:
            >>> KeptOperation("head", "exp", "model.py:3", worth=0.02, flops=64).why
            'rounding'
        """
        if self.worth is None:
            return "not seen"
        return "rounding" if math.isfinite(self.worth) else "range"


@dataclasses.dataclass(frozen=True)
class TuneReport(Exported):
    """What `jmp_autocast.tune` has found.

    Args:
        name: The function's name.
        policy: The policy that was found.
        kept: What it keeps in float32, the largest worth first, those that are not seen last.
        candidates: The number of operations that could have been kept.
        runs: How many policies were tried.
        tolerance: The tolerance.
        loss: The loss in float32, the mean over the batches: the unit of ``worth``. None for a
            function without one, and where the first policy was good enough.
        undetermined: The number of arrays that float32 itself does not determine to the tolerance,
            which have only to be finite.
        unpredicted: The number of operations that the prediction does not see: they stand in
            derivative rules, or before a ``while``.
        refused: The error of JAX for a function that it cannot differentiate, so that nothing is
            predicted; else ``""``.
        error_before: The error of the policy that the search started from.
        error_after: The error of the policy that was found.
        share_before: The share of the FLOPs of matmuls and convolutions that runs in 16 bits under
            the policy that the search started from.
        share_after: The same under the policy that was found.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, tune
        >>> report = tune(jnp.matmul, jnp.eye(8), jnp.ones((8, 8)), policy=BF16, tolerance=0.01)
        >>> report.policy == BF16, report.runs
        (True, 1)
    """

    _computed: ClassVar[tuple[str, ...]] = ("summary",)

    name: str
    # The policy has a file format of its own: `Policy.save`.
    policy: Policy = dataclasses.field(metadata=NOT_EXPORTED)
    kept: tuple[KeptOperation, ...]
    candidates: int
    runs: int
    tolerance: float
    loss: float | None
    undetermined: int
    unpredicted: int
    refused: str
    error_before: float
    error_after: float
    share_before: float
    share_after: float

    @property
    def summary(self) -> str:
        """The result in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, tune
            >>> x = jnp.ones((8, 8))
            >>> tune(jnp.matmul, jnp.eye(8), x, policy=BF16, tolerance=0.01).summary
            'matmul: 0 of 1 operation in float32, 1 run'
        """
        kept = f"{len(self.kept)} of {counted(self.candidates, 'operation')}"
        return cut(f"{self.name}: {kept} in float32, {counted(self.runs, 'run')}")

    def __str__(self) -> str:
        """Returns the result in a line, the errors, and a table of the operations in float32."""
        left_out = unpredicted = worth = None
        error = f"{self.error_before:.3g} before, {self.error_after:.3g} now, "
        flops = f"of matmuls and convolutions in {self.policy.compute_dtype}: "
        if self.undetermined:
            left_out = f"{counted(self.undetermined, 'array')} with too few digits in float32"
        if self.unpredicted:
            why = self.refused or "in derivative rules or before a while"
            unpredicted = f"{counted(self.unpredicted, 'operation')}: {why}"
        if self.kept:
            of = "relative error" if self.loss is None else f"change of the loss of {self.loss:.4g}"
            worth = f"{of} if this alone is lowered, to first order"
        facts = {
            "error": f"{error}tolerance {self.tolerance:g}",
            "left out": left_out,
            "FLOPs": f"{flops}{100 * self.share_before:.1f} % before, "
            f"{100 * self.share_after:.1f} % now",
            "unpredicted": unpredicted,
            "worth": worth,
        }
        lines = [self.summary, *labeled(facts)]
        if self.kept:
            columns = {"worth": ">9", "FLOPs": ">7", "why": "8", "operation": "20"}
            lines += ["", *table({**columns, "scope and source": ""}, self.kept, _cells)]
        return "\n".join(lines)


def _cells(operation: KeptOperation) -> list[Any]:
    where = place(operation.scope or "(everywhere)", source=operation.source)
    worth = "-" if operation.worth is None else f"{operation.worth:.2g}"
    return [worth, scaled(operation.flops), operation.why, operation.primitive, where]
