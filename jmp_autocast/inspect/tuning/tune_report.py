"""`TuneReport`: the policy found by `tune`, and the operations that it keeps in float32."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ...policies import Policy
from ..export import NOT_EXPORTED, Exported, counted, cut, labeled, located, scaled, table


@dataclasses.dataclass(frozen=True, slots=True)
class KeptOperation:
    """One operation that `jmp_autocast.tune` keeps in float32.

    Args:
        scope: The names of its scopes, joined by ``/``; ``""`` for the whole program.
        primitive: The primitive's name.
        source: The user's source line of its first equation.
        worth: The change of the loss if this operation alone runs in 16 bits, to first order;
            without a loss, the relative error of the results. Infinite if values or gradients are
            out of the range of the compute dtype, and None without a prediction.
        flops: The FLOPs of its equations in one call, over all iterations of loops.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import FP16, tune
        >>> def model(w, x):
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(x @ w) + 1.0) @ w
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
        """Why it is kept: ``"range"``, ``"rounding"``, or ``"not seen"`` without a prediction.

        Example:
            >>> KeptOperation("head", "exp", "model.py:3", worth=0.02, flops=64).why
            'rounding'
        """
        if self.worth is None:
            return "not seen"
        return "rounding" if math.isfinite(self.worth) else "range"


@dataclasses.dataclass(frozen=True)
class TuneReport(Exported):
    """The result of `jmp_autocast.tune`.

    Args:
        name: The function's name.
        policy: The policy that was found.
        kept: The operations that it keeps in float32, the largest worth first, those without a
            prediction last.
        candidates: The number of operations that could have been kept.
        runs: The number of policies that were tried.
        tolerance: The largest accepted relative error.
        loss: The loss in float32, the mean over the batches, which the changes in ``worth`` refer
            to. None if the function has no loss, or if the first policy passed.
        undetermined: The number of arrays that float32 itself does not determine to the tolerance:
            they only have to be finite.
        unpredicted: The number of operations without a prediction: those in derivative rules, or
            before a ``while``.
        refused: The error of JAX if it cannot differentiate the function, so that no operation has
            a prediction; else ``""``.
        error_before: The error of the policy that the search started from.
        error_after: The error of the policy that was found.

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
        """Returns the summary, the errors, and a table of the operations in float32."""
        facts = {
            "error": f"{self.error_before:.3g} before, {self.error_after:.3g} now, "
            f"tolerance {self.tolerance:g}"
        }
        if self.undetermined:
            arrays = counted(self.undetermined, "array")
            facts["left out"] = f"{arrays} with too few digits in float32"
        if self.unpredicted:
            why = self.refused or "in derivative rules or before a while"
            facts["unpredicted"] = f"{counted(self.unpredicted, 'operation')}: {why}"
        if self.kept:
            of = "relative error" if self.loss is None else f"change of the loss of {self.loss:.4g}"
            facts["worth"] = f"{of} if this alone is lowered, to first order"
        lines = [self.summary, *labeled(facts)]
        if self.kept:
            columns = {"worth": ">9", "FLOPs": ">7", "why": "8", "operation": "20"}
            lines += ["", *table({**columns, "scope and source": ""}, self.kept, _cells)]
        return "\n".join(lines)


def _cells(operation: KeptOperation) -> list[Any]:
    where = located(operation.scope or "(everywhere)", source=operation.source)
    worth = "-" if operation.worth is None else f"{operation.worth:.2g}"
    return [worth, scaled(operation.flops), operation.why, operation.primitive, where]
