"""`TuneReport`: what `tune` keeps in float32, why, and what that costs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from ...policies import Policy
from ..text import counted, cut, scaled


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
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
        >>> from jmp_autocast import tune
        >>> def model(w, x):
        ...     with jax.named_scope("energy"):
        ...         return jnp.sqrt(jnp.square(x @ w) + 1.0)
        >>> batches = [(jnp.eye(4), jnp.full((2, 4), 500.0))]
        >>> _, report = tune(model, batches, tolerance=0.01, progress=False, report=True)
        >>> [(pin.scope, pin.primitive, pin.largest, pin.why) for pin in report.pinned]
        [('energy', 'square', 250000.0, 'range')]
    """

    scope: str
    primitive: str
    source: str
    largest: float
    why: str
    flops: int


@dataclasses.dataclass(frozen=True)
class TuneReport:
    """What `jmp_autocast.tune` has found, beside the policy.

    Args:
        name: The function's name.
        policy: The policy that was found.
        pinned: What it keeps in float32, in the order of the program.
        units: The number of operations that could have been kept.
        runs: How many candidates were tried, those in the log included.
        tolerance: The tolerance, None where a callable decided.
        error_before: The error of the policy that the search started from, None where a callable
            decided.
        error_after: The error of the policy that was found.
        share_before: The share of the FLOPs of matmuls and convolutions that runs in 16 bits under
            the policy that the search started from.
        share_after: The same under the policy that was found.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, tune
        >>> batches = [(jnp.eye(4), jnp.ones((4, 4)))]
        >>> options = dict(policy=BF16, tolerance=0.01, progress=False, report=True)
        >>> policy, report = tune(jnp.matmul, batches, **options)
        >>> policy == BF16, report.runs
        (True, 1)
    """

    name: str
    policy: Policy
    pinned: tuple[Pin, ...]
    units: int
    runs: int
    tolerance: float | None
    error_before: float | None
    error_after: float | None
    share_before: float
    share_after: float

    def __str__(self) -> str:
        """Returns the result in a line, the cost, and a table of what is kept in float32."""
        kept = f"{len(self.pinned)} of {counted(self.units, 'operation', 'operations')}"
        lines = [f"{self.name}: {kept} in float32, {counted(self.runs, 'run', 'runs')}"]
        if self.error_before is not None:
            lines.append(
                f"error       {self.error_before:.3g} before, {self.error_after:.3g} now, "
                f"tolerance {self.tolerance:g}"
            )
        lines.append(
            f"FLOPs       of matmuls and convolutions in {self.policy.compute_dtype}: "
            f"{100 * self.share_before:.1f} % before, {100 * self.share_after:.1f} % now"
        )
        if self.pinned:
            lines += ["", f"{'largest':>9} {'FLOPs':>7}  why     {'operation':20} scope, source"]
        for pin in self.pinned:
            where = f"{pin.primitive:20} {pin.scope or '(everywhere)'}, {pin.source}"
            lines.append(f"{pin.largest:9.3g} {scaled(pin.flops):>7}  {pin.why:7} {where}")
        return "\n".join(map(cut, lines))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain dicts, lists, strings and numbers, without the policy.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import tune
            >>> batches = [(jnp.eye(4), jnp.ones((4, 4)))]
            >>> options = dict(tolerance=0.01, progress=False, report=True)
            >>> _, report = tune(jnp.matmul, batches, **options)
            >>> report.to_dict()["pinned"]
            []
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["policy"]
        return fields | {"pinned": [dataclasses.asdict(pin) for pin in self.pinned]}

    def to_json(self, path: str | pathlib.Path | None = None) -> str:
        """Returns the report as JSON text; an infinity is the string ``"inf"``.

        Args:
            path: A file to write it to as well.

        Example:
            >>> import json
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import tune
            >>> batches = [(jnp.eye(4), jnp.ones((4, 4)))]
            >>> options = dict(tolerance=0.01, progress=False, report=True)
            >>> _, report = tune(jnp.matmul, batches, **options)
            >>> json.loads(report.to_json())["runs"]
            1
        """
        content = self.to_dict()
        if content["error_before"] == float("inf"):
            content["error_before"] = "inf"
        text = json.dumps(content)
        if path is not None:
            pathlib.Path(path).write_text(text, encoding="utf-8")
        return text
