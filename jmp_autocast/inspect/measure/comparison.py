"""`Comparison`: where a program in mixed precision departs from the float32 one."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..text import cut
from .cotangents import Tap
from .error_probe import COMPUTED, Distance, ErrorReading
from .measured import Site

_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One value of a program, in float32 and in mixed precision.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive that makes it.
        inside: The loops, branches and device maps around it, outermost first.
        shapes: The shape of each float result.
        computed: The dtype in the mixed program, ``""`` for one that autocast does not touch.
        introduced: The relative error that the equation itself makes. For a cotangent, what is
            added to the error of the cotangents that it is computed from.
        error: The relative error of the value: the norm of the difference over the norm of the
            float32 program's value. Infinite where ``lost`` is not 0.
        cosine: The cosine of the angle between the two values.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        introduced_lost: The number of those that the equation itself makes so.
        largest: The largest finite magnitude in the float32 program.
        runs: How often the equation ran. Errors and cosine are those of the worst run.
        worst_run: The run with the largest introduced error, counted from 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> row = compare(jnp.matmul, jnp.eye(2), jnp.full((2, 2), 0.1), policy=BF16).rows[0]
        >>> row.primitive, row.computed, 1e-4 < row.introduced < 1e-2
        ('dot_general', 'bfloat16', True)
    """

    scope: str
    source: str
    primitive: str
    inside: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    computed: str
    introduced: float
    error: float
    cosine: float
    lost: int
    introduced_lost: int
    largest: float
    runs: int
    worst_run: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayError:
    """The error of an output or a gradient.

    Args:
        error: The relative error: the norm of the difference over the norm of the float32 value.
        cosine: The cosine of the angle between the two.
        lost: The number of elements that are infinite or NaN in the mixed program alone.
        largest: The largest finite magnitude in the float32 program.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import FP16, compare
        >>> output = compare(jnp.matmul, jnp.eye(2), jnp.full((2, 2), 7e4), policy=FP16).outputs[0]
        >>> output.error, output.lost, output.largest
        (inf, 4, 70000.0)
    """

    error: float
    cosine: float
    lost: int
    largest: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `jmp_autocast.compare` returns.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        rows: A row per equation that makes floats, the largest introduced error first.
        outputs: The errors of the float outputs, by their position.
        cotangents: A row per value of the forward pass, for the cotangent that the backward pass
            gives it, the largest introduced error first; empty without ``argnums``. What is inside
            loops and branches has none.
        gradients: The errors of the gradients, by the path of the argument.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> comparison = compare(
        ...     loss, jnp.ones((3, 2)) / 3, jnp.ones((4, 3)), policy=BF16, argnums=0
        ... )
        >>> comparison.gradients["0"].cosine > 0.999
        True
    """

    name: str
    compute_dtype: str
    rows: tuple[ComparisonRow, ...]
    outputs: Mapping[int, ArrayError]
    cotangents: tuple[ComparisonRow, ...]
    gradients: Mapping[str, ArrayError]

    @property
    def summary(self) -> str:
        """The comparison in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> compare(jnp.matmul, jnp.eye(2), jnp.eye(2), policy=BF16).summary
            'matmul in bfloat16: outputs err by 0'
        """
        worst = max((each.error for each in self.outputs.values()), default=0.0)
        line = f"{self.name} in {self.compute_dtype}: outputs err by {worst:.2g}"
        if self.gradients:
            gradient = max(each.error for each in self.gradients.values())
            line += f", gradients by {gradient:.2g}"
        lost = sum(1 for row in self.rows if row.introduced_lost)
        if lost:
            line += f"; {lost} equations overflow"
        return cut(line)

    def __str__(self) -> str:
        """Returns the summary, and the equations that introduce the largest errors."""
        lines = [self.summary, "", *_table(self.rows)]
        if self.gradients:
            lines += ["", "cotangents, by what is added to the error of those before", ""]
            lines += _table(self.cotangents)
            lines += ["", f"{'error':>10} {'cosine':>8}  gradient"]
            ordered = sorted(self.gradients.items(), key=lambda item: -item[1].error)
            lines += [cut(f"{e.error:10.2g} {e.cosine:8.5f}  {p}") for p, e in ordered[:_SHOWN]]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain dicts, lists, strings and numbers.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> content = compare(jnp.matmul, jnp.eye(2), jnp.eye(2), policy=BF16).to_dict()
            >>> content["outputs"][0]["cosine"]
            1.0
        """
        return {
            "name": self.name,
            "compute_dtype": self.compute_dtype,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "outputs": {i: dataclasses.asdict(each) for i, each in self.outputs.items()},
            "cotangents": [dataclasses.asdict(row) for row in self.cotangents],
            "gradients": {path: dataclasses.asdict(e) for path, e in self.gradients.items()},
        }

    def to_json(self, path: str | pathlib.Path | None = None) -> str:
        """Returns the comparison as JSON text; an infinity is the string ``"inf"``.

        Args:
            path: A file to write it to as well.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, compare
            >>> compare(jnp.matmul, jnp.eye(2), jnp.eye(2), policy=BF16).to_json()[:34]
            '{"name": "matmul", "compute_dtype"'
        """
        text = json.dumps(_without_infinities(self.to_dict()), allow_nan=False)
        if path is not None:
            pathlib.Path(path).write_text(text, encoding="utf-8")
        return text


def comparison_of(
    *,
    name: str,
    compute_dtype: str,
    sites: Sequence[Site],
    readings: ErrorReading,
    outputs: Sequence[Distance | None],
    taps: Sequence[Tap],
    cotangents: Sequence[Distance],
    gradients: Mapping[str, Distance],
) -> Comparison:
    """Returns the comparison that measurements make.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        sites: The equations.
        readings: What was measured of each, as arrays with an element per equation.
        outputs: What was measured of each output, None for what is no float.
        taps: The values whose cotangents were taken.
        cotangents: What was measured of each.
        gradients: What was measured of each gradient, by the path of the argument.
    """
    rows = [_row(site, readings, i) for i, site in enumerate(sites)]
    return Comparison(
        name=name,
        compute_dtype=compute_dtype,
        rows=_ranked(rows),
        outputs={i: _array_error(d) for i, d in enumerate(outputs) if d is not None},
        cotangents=_ranked(_cotangent_rows(taps, cotangents)),
        gradients={path: _array_error(d) for path, d in gradients.items()},
    )


def _ranked(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.introduced, -row.error)))


def _array_error(distance: Distance) -> ArrayError:
    return ArrayError(
        error=float(distance.error),
        cosine=float(distance.cosine),
        lost=int(distance.lost),
        largest=float(distance.largest),
    )


def _row(site: Site, readings: ErrorReading, i: int) -> ComparisonRow:
    distance = readings.distance
    return ComparisonRow(
        scope=site.scope,
        source=site.source,
        primitive=site.primitive,
        inside=site.inside,
        shapes=site.shapes,
        computed=COMPUTED[int(readings.computed[i])],
        introduced=float(readings.introduced[i]),
        error=float(distance.error[i]),
        cosine=float(distance.cosine[i]),
        lost=int(distance.lost[i]),
        introduced_lost=int(readings.introduced_lost[i]),
        largest=float(distance.largest[i]),
        runs=int(readings.runs[i]),
        worst_run=int(readings.worst_run[i]),
    )


def _cotangent_rows(taps: Sequence[Tap], cotangents: Sequence[Distance]) -> list[ComparisonRow]:
    """A cotangent is computed from those of its value's readers."""
    carried = [0.0] * len(taps)
    for tap, distance in zip(taps, cotangents, strict=True):
        for source in tap.sources:
            carried[source] = max(carried[source], float(distance.error))
    rows = []
    for tap, distance, before in zip(taps, cotangents, carried, strict=True):
        error = float(distance.error)
        # Errors that have nothing to do with each other add up like the sides of a right angle.
        added = 0.0
        if error > before:
            added = math.sqrt((error - before) * (error + before))
        rows.append(
            ComparisonRow(
                scope=tap.site.scope,
                source=tap.site.source,
                primitive=tap.site.primitive,
                inside=tap.site.inside,
                shapes=tap.site.shapes,
                computed="",
                introduced=added,
                error=error,
                cosine=float(distance.cosine),
                lost=int(distance.lost),
                introduced_lost=0 if math.isinf(before) else int(distance.lost),
                largest=float(distance.largest),
                runs=1,
                worst_run=0,
            )
        )
    return rows


def _table(rows: Sequence[ComparisonRow]) -> list[str]:
    lines = [f"{'introduced':>10} {'error':>8} {'cosine':>8} {'largest':>9}  equation"]
    for row in rows[:_SHOWN]:
        numbers = f"{row.introduced:10.2g} {row.error:8.2g} {row.cosine:8.5f} {row.largest:9.3g}"
        where = " ".join(filter(None, (row.primitive, row.computed, row.scope, row.source)))
        lines.append(cut(f"{numbers}  {where}"))
    if len(rows) > _SHOWN:
        lines.append(f"... and {len(rows) - _SHOWN} more")
    return lines


def _without_infinities(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _without_infinities(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_without_infinities(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
