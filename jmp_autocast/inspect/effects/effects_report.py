"""`Effects`: what the rounding of each operation and parameter does to a loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from ...policies.errors import did_you_mean
from ..export import Exported, counted, cut, labeled, place, rest, table

Kind = Literal["product", "operation", "parameter"]
_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """What the rounding of one operation or parameter to one format does to the loss.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``; of a parameter its path in
            the arguments.
        source: The user's source line; ``""`` of a parameter.
        primitive: The primitive's name; ``""`` of a parameter.
        kind: ``"product"`` (a matmul or a convolution), ``"operation"`` or ``"parameter"``.
        inside: The loops and branches around it, outermost first.
        backward: It belongs to a backward pass in the function.
        shapes: The shape of each float result, or of the parameter.
        flops: The FLOPs of all its runs in one call.
        format: The format that it is rounded to.
        predicted: The change of the loss to first order: the rounding error times the cotangent,
            summed up, the mean over the batches. With ``relative=True`` the relative error.
        spread: The root of the sum of the squares of these products: how large the change would be
            if the errors were independent, as those of stochastic rounding are. Of what all devices
            of a device map compute alike it is too small by the root of their number, where
            ``check_vma=False`` hides that they do.
        deviation: The standard deviation of ``predicted`` over the batches; 0 of one.
        measured: The change of the loss where this alone was really lowered; None where it was not.
        lost: How many elements are finite in float32 and not in the format, in all batches.
        iterations: ``predicted`` of each iteration of the loops around it; empty without a loop.
        doubt: Why not to trust ``predicted``: ``"range"``, the format does not hold all values;
            ``"second order"``, it is off by more than a factor of 2 where it was measured;
            ``"not verified"``, so are most that were measured in this format, and this was not;
            ``"loop"``, its iterations round what earlier ones have changed, and it was not
            measured.
            ``""`` where nothing speaks against it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import explain_effects
        >>> def loss(w, x):
        ...     return jnp.sum((x @ w) ** 2)
        >>> effects = explain_effects(loss, jnp.full((2, 2), 0.3), jnp.ones((1, 2)))
        >>> worst = effects.of("bfloat16", "product")[0]
        >>> worst.primitive, round(worst.predicted, 4), round(worst.measured, 4)
        ('dot_general', 0.0037, 0.0038)
    """

    _computed: ClassVar[tuple[str, ...]] = ("effect",)

    scope: str
    source: str
    primitive: str
    kind: Kind
    inside: tuple[str, ...]
    backward: bool
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    format: str
    predicted: float
    spread: float
    deviation: float
    measured: float | None
    lost: int
    iterations: tuple[float, ...]
    doubt: str

    @property
    def effect(self) -> float:
        """The change of the loss: as it was measured, and else as it is predicted.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_effects
            >>> effects = explain_effects(lambda w: jnp.sum(w * w), jnp.full(2, 0.5))
            >>> [row.effect for row in effects.of("bfloat16")]
            [0.0]
        """
        return self.predicted if self.measured is None else self.measured


@dataclasses.dataclass(frozen=True, slots=True)
class ScopeEffect:
    """What the rounding of all that stands in one scope does to the loss, to first order.

    Args:
        scope: The scope; ``""`` is the whole program.
        format: The format.
        count: How many operations or parameters it has.
        flops: Their FLOPs.
        effect: The sum of their effects, which may cancel.
        spread: The root of the sum of the squares of their spreads, which do not.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_effects
        >>> def loss(w, x):
        ...     with jax.named_scope("layer"):
        ...         return jnp.sum((x @ w) ** 2)
        >>> effects = explain_effects(loss, jnp.full((2, 2), 0.3), jnp.ones((1, 2)))
        >>> [(each.scope, each.count) for each in effects.by_scope("bfloat16")]
        [('', 1), ('layer', 1)]
    """

    scope: str
    format: str
    count: int
    flops: int
    effect: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Effects(Exported):
    """What `jmp_autocast.explain_effects` returns.

    Args:
        name: The function's name.
        loss: The loss in float32, the mean over the batches.
        formats: The formats, by name.
        batches: The number of batches.
        rows: What was found, an `Effect` for each operation or parameter and format.
        decisions: What ranks, compares or rounds values that are differentiated, each with its
            line: a rounding may change what it decides, and no derivative shows that.
        closed: What has a derivative rule of its own, or is a kernel. It counts as one operation:
            what it holds was not looked at.
        relative: The effects are relative errors of all results together, and ``loss`` is the norm
            of these.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import explain_effects
        >>> def loss(w, x):
        ...     return jnp.sum((x @ w) ** 2)
        >>> print(explain_effects(loss, jnp.eye(2), jnp.ones((1, 2)), formats="e4m3").summary)
        loss: 1 operation and 1 parameter in e4m3; the largest effect is 0 of a loss of 2
    """

    _computed: ClassVar[tuple[str, ...]] = ("summary",)

    name: str
    loss: float
    formats: tuple[str, ...]
    batches: int
    rows: tuple[Effect, ...]
    decisions: tuple[str, ...]
    closed: tuple[str, ...]
    relative: bool = False

    def of(self, format: str, kind: Kind | None = None) -> tuple[Effect, ...]:
        """Returns the rows of a format, the largest effect first.

        Args:
            format: The format.
            kind: ``"product"``, ``"operation"`` or ``"parameter"``; None for all.

        Raises:
            ValueError: It is none of the formats that were asked for.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_effects
            >>> kinds = ["operation", "parameter"]
            >>> effects = explain_effects(lambda w: jnp.sum(jnp.sin(w)), jnp.ones(2), kinds=kinds)
            >>> [row.primitive for row in effects.of("bfloat16", "operation")]
            ['sin', 'reduce_sum']
        """
        if format not in self.formats:
            known = ", ".join(map(repr, self.formats))
            raise ValueError(
                f"format must be one that was asked for, got {format!r}."
                f"{did_you_mean(str(format), self.formats)} Write {known}, or pass formats= to "
                "explain_effects."
            )
        rows = [r for r in self.rows if r.format == format and kind in (None, r.kind)]
        return tuple(sorted(rows, key=lambda row: -abs(row.effect)))

    def by_scope(self, format: str, kind: Kind = "product") -> tuple[ScopeEffect, ...]:
        """Returns sums over the scopes of a program, each before those in it.

        Args:
            format: The format.
            kind: What is summed up.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import explain_effects
            >>> def loss(w, x):
            ...     with jax.named_scope("layer"):
            ...         return jnp.sum((x @ w) ** 2)
            >>> effects = explain_effects(loss, jnp.full((2, 2), 0.3), jnp.ones((1, 2)))
            >>> effects.by_scope("bfloat16")[-1].scope
            'layer'
        """
        groups: dict[str, list[Effect]] = {"": []}
        chosen = set(map(id, self.of(format, kind)))
        for row in (row for row in self.rows if id(row) in chosen):
            names = row.scope.split("/") if row.scope else []
            for depth in range(len(names) + 1):
                groups.setdefault("/".join(names[:depth]), []).append(row)
        # Errors have no signs, and do not cancel.
        total = math.hypot if self.relative else lambda *numbers: math.fsum(numbers)
        return tuple(
            ScopeEffect(
                scope=scope,
                format=format,
                count=len(rows),
                flops=sum(row.flops for row in rows),
                effect=total(*(row.effect for row in rows)),
                spread=math.hypot(*(row.spread for row in rows)),
            )
            for scope, rows in groups.items()
        )

    @property
    def summary(self) -> str:
        """The result in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_effects
            >>> def loss(w):
            ...     return jnp.sum(w)
            >>> explain_effects(loss, jnp.ones(2)).summary[:43]
            'loss: 0 operations and 1 parameter in bfloa'
        """
        of_one = [row for row in self.rows if row.format == self.formats[0]]
        params = sum(row.kind == "parameter" for row in of_one)
        largest = max((abs(row.effect) for row in self.rows), default=0.0)
        text = f"{self.name}: {counted(len(of_one) - params, 'operation')} and "
        text += f"{counted(params, 'parameter')} in {', '.join(self.formats)}; the largest "
        if self.relative:
            return cut(f"{text}relative error is {largest:.2g}")
        return cut(f"{text}effect is {largest:.2g} of a loss of {self.loss:.4g}")

    def __str__(self) -> str:
        """Returns the summary, what first order does not see, and a table for each format."""
        facts = {
            "decides": ", ".join(f"({each})" for each in self.decisions) or None,
            "not opened": ", ".join(f"({each})" for each in self.closed) or None,
        }
        lines = [self.summary, *labeled(facts)]
        columns = {"effect": ">9.2g", "measured": ">9", "spread": ">8.2g"}
        columns |= {"batches": ">8.2g"} if self.batches > 1 else {}
        columns |= {"doubt": "13", "operation in {}": ""}
        for format in self.formats:
            named = {title.format(format): spec for title, spec in columns.items()}
            rows = self.of(format)
            lines += ["", *table(named, rows[:_SHOWN], self._cells)]
            lines += rest(rows, _SHOWN, "more; of() has all")
        return "\n".join(lines)

    def _cells(self, row: Effect) -> Sequence[Any]:
        measured = "" if row.measured is None else f"{row.measured:.2g}"
        of_batches = [row.deviation] if self.batches > 1 else []
        of = "backward" if row.backward else ""
        where = place(row.primitive or "parameter", of, row.scope, source=row.source)
        return [row.predicted, measured, row.spread, *of_batches, row.doubt, where]
