"""`NumericsReport`: counts of the values of a program, by equation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import starmap
from typing import Any, ClassVar

import jax
import numpy as np

from ..export import NOT_EXPORTED, Exported, counted, cut, located, rest, table
from .measured import MeasuredEquation, each_reading
from .numerics_probe import INFINITY, NEVER, Reading

# Twenty rows fit on a screen; the report has all.
_SHOWN = 20

_PASSED_ON = "the infinity or NaN of a result: an argument holds one"

# Over mapped axes, these fields are reduced to an extreme value. All other fields are summed.
_EXTREMES = {"largest": np.max, "smallest": np.min, "first_run": np.min, "first": np.min}


@dataclasses.dataclass(frozen=True, slots=True)
class NumericsRow(MeasuredEquation):
    """The values of one equation. All fields are strings, numbers and tuples of them.

    A fault is a NaN from operands without a NaN, or an infinity from finite operands. In mode
    ``"overflow"`` a value beyond float16's range is a fault, too.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        inside: The loops, branches and ``shard_map`` around it, outermost first.
        backward: Whether the equation belongs to a backward pass that JAX created.
        shapes: The shape of each float result.
        dtypes: The dtype of each float result.
        runs: How often it ran, over all iterations and devices.
        nan: The number of NaNs. Counts are over all runs and stop at 2**32 - 1.
        inf: The number of infinities.
        zero: The number of zeros.
        subnormal: The number of values that are subnormal in their dtype.
        large: The number of finite values that a float16 rounds to infinity.
        small: The number of values other than 0 that a float16 rounds to 0.
        largest: The largest finite magnitude, 0.0 if there is none.
        smallest: The smallest magnitude other than 0, infinity if there is none.
        bad_runs: The number of runs with a fault.
        first_run: The first run with a fault, counted from 0; None without a fault.
        order: The number of equations that ran before that run; None without a fault.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import check_numerics
        >>> _, report = check_numerics(jnp.log, mode="collect")(jnp.array([0.0, 1.0, 1.0]))
        >>> (row,) = report.rows
        >>> row.primitive, row.dtypes, row.inf, row.zero, row.largest
        ('log', ('float32',), 1, 2, 0.0)
    """

    runs: int
    nan: int
    inf: int
    zero: int
    subnormal: int
    large: int
    small: int
    largest: float
    smallest: float
    bad_runs: int
    first_run: int | None
    order: int | None

    @property
    def values(self) -> int:
        """The number of values, over all runs.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import check_numerics
            >>> from jax import lax
            >>> def f(x):
            ...     return lax.fori_loop(0, 5, lambda i, y: jnp.sin(y), x)
            >>> _, report = check_numerics(f, mode="collect")(jnp.ones(3))
            >>> [(row.runs, row.values) for row in report.rows]
            [(5, 15)]
        """
        return self.runs * sum(math.prod(shape) for shape in self.shapes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NumericsReport(Exported):
    """The report of `jmp_autocast.check_numerics`, returned beside the result.

    It is a pytree, so that a jitted function may return it. Under ``vmap`` and ``shard_map`` the
    rows sum over the mapped axis. Readings stay on the device until ``rows`` is used.

    Args:
        name: The function's name.
        mode: The mode of the check.
        equations: The measured equations.
        readings: The counts of these equations, as arrays with an element per equation.
        passed_on: Whether a NaN of an argument reaches a result, or an infinity of an argument
            reaches a scalar result.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import check_numerics
        >>> f = lambda x: jnp.exp(x * 2.0)
        >>> _, report = check_numerics(f, mode="overflow")(jnp.array([1.0, 6.0]))
        >>> [(row.primitive, row.large) for row in report.bad]
        [('exp', 1)]
    """

    _computed: ClassVar[tuple[str, ...]] = ("rows",)

    name: str = dataclasses.field(metadata={"static": True})
    mode: str = dataclasses.field(metadata={"static": True})
    equations: tuple[MeasuredEquation, ...] = dataclasses.field(
        metadata={"static": True, **NOT_EXPORTED}
    )
    readings: Reading = dataclasses.field(metadata=NOT_EXPORTED)
    passed_on: Any = False

    @property
    def rows(self) -> list[NumericsRow]:
        """A row per equation with float results, in program order.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import check_numerics
            >>> f = lambda x: jnp.exp(x) - 1.0
            >>> _, report = check_numerics(f, mode="collect")(jnp.zeros(4))
            >>> [(row.primitive, row.zero) for row in report.rows]
            [('exp', 0), ('sub', 4)]
        """
        readings = _over_mapped_axes(jax.tree.map(np.asarray, self.readings))
        return list(starmap(_row, each_reading(self.equations, readings)))

    @property
    def bad(self) -> list[NumericsRow]:
        """The rows with a fault, the earliest fault first.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import check_numerics
            >>> f = lambda x: jnp.log(x) - jnp.log(x)
            >>> _, report = check_numerics(f, mode="collect")(jnp.zeros(4))
            >>> [(row.primitive, row.inf, row.nan) for row in report.bad]
            [('log', 4, 0), ('log', 4, 0), ('sub', 0, 4)]
        """
        found = [row for row in self.rows if row.order is not None]
        return sorted(found, key=lambda row: row.order or 0)

    @property
    def first(self) -> NumericsRow | None:
        """The row with the first fault, None without a fault.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import check_numerics
            >>> _, report = check_numerics(jnp.log, mode="collect")(jnp.array([0.0, 1.0]))
            >>> report.first.primitive
            'log'
            >>> check_numerics(jnp.exp, mode="collect")(jnp.ones(2))[1].first is None
            True
        """
        return next(iter(self.bad), None)

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import check_numerics
            >>> _, report = check_numerics(jnp.log, mode="collect")(jnp.array([0.0, 1.0]))
            >>> report.summary
            'log: an infinity or NaN, made by 1 of 1 equation'
        """
        rows = self.rows
        bad, of = [row for row in rows if row.bad_runs], counted(len(rows), "equation")
        overflow = self.mode == "overflow"
        if not bad:
            none = "nothing beyond float16's range" if overflow else "all is finite"
            if any(row.nan or row.inf for row in rows):
                none = "none makes an infinity or NaN that no operand holds"
            if np.any(self.passed_on):
                none = f"none makes {_PASSED_ON}"
            return cut(f"{self.name}: {of}, {none}")
        fault = "a value beyond float16's range" if overflow else "an infinity or NaN"
        return cut(f"{self.name}: {fault}, made by {len(bad)} of {of}")

    def __str__(self) -> str:
        """Returns the summary, the faults in the order they occur, and the range of each row.

        The rows with the largest values come first: they are the next to overflow.
        """
        bad = self.bad
        lines = [self.summary]
        for row in bad[:_SHOWN]:
            lines += ["", *map(cut, _lines(row))]
        if left := rest(bad, _SHOWN, "more; report.bad holds all"):
            lines += ["", *left]
        columns = {"largest": ">10.3g", "smallest": ">10.3g", "zeros": ">7", "to 0 in f16": ">11"}

        def cells(row: NumericsRow) -> list[Any]:
            where = located(row.primitive, ",".join(row.dtypes), row.scope, source=row.source)
            return [row.largest, row.smallest, _share(row.zero, row), _share(row.small, row), where]

        ordered = sorted(self.rows, key=lambda row: -row.largest)
        more = "more; report.rows holds all"
        lines += ["", *table({**columns, "equation": ""}, ordered, cells, _SHOWN, more)]
        return "\n".join(lines)


def bad_message(name: str, row: NumericsRow) -> str:
    """Returns the text of the error about the first fault of a function."""
    first, *rest = _lines(row)
    fix = (
        "check_numerics(..., mode='collect') has the range of every value; full_precision() or "
        "a rule of the policy for its scope keeps a region in float32."
    )
    return "\n".join([f"{name}: {first}", *rest, fix])


def passed_message(name: str, arguments: Sequence[str]) -> str:
    """Returns the text of the error about an infinity or NaN that comes from an argument.

    Args:
        name: The function's name.
        arguments: The paths of the arguments that hold an infinity or a NaN, if they are known.
    """
    which = f": {', '.join(arguments)}" if arguments else ""
    return f"{name}: no equation makes {_PASSED_ON}{which}. Pass finite values."


def _lines(row: NumericsRow) -> list[str]:
    made = [
        counted(count, *nouns)
        for count, nouns in (
            (row.nan, ("NaN", "NaNs")),
            (row.inf, ("infinity", "infinities")),
            (row.large, ("value beyond float16", "values beyond float16")),
        )
        if count
    ]
    types = ", ".join(f"{d}{list(s)}" for d, s in zip(row.dtypes, row.shapes, strict=True))
    among = counted(row.values, "value")
    scope = f"scope {row.scope}" if row.scope else "no scope"
    lines = [f"{row.primitive} makes {' and '.join(made)} among {among} ({types}) in {scope}"]
    around = f", inside {' > '.join(row.inside)}" if row.inside else ""
    lines.append(f"    at {row.source or 'an unknown line'}{around}")
    if row.runs > 1:
        lines.append(f"    first in run {row.first_run} of {row.runs}, counted from 0")
    if row.backward:
        lines.append("    in the backward pass of that line")
    return lines


def _share(count: int, row: NumericsRow) -> str:
    return f"{100 * count / row.values:.3g} %" if row.values else "-"


def _over_mapped_axes(reading: Reading) -> Reading:
    """Reduces the axes that ``vmap`` has added before the axis of the equations."""
    axes = tuple(range(reading.runs.ndim - 1))

    def over(path: Any, x: Any) -> Any:
        name = path[-1].name
        if name in _EXTREMES:
            return _EXTREMES[name](x, axis=axes)
        # The 64-bit sum saturates at the largest uint32, like counts on the device.
        return np.minimum(np.sum(x, axis=axes, dtype=np.uint64), NEVER)

    return jax.tree_util.tree_map_with_path(over, reading)


def _row(equation: MeasuredEquation, reading: Reading) -> NumericsRow:
    # Mode "raise" counts only NaNs and infinities. The other fields are those of an empty array.
    empty = {"largest": 0, "smallest": INFINITY}
    numbers: dict[str, Any] = {
        name: empty.get(name, 0) if count is None else count
        for name, count in reading.counts._asdict().items()
    }
    for name in empty:
        numbers[name] = float(np.uint32(numbers[name]).view(np.float32))
    return NumericsRow(
        **dataclasses.asdict(equation),
        **numbers,
        runs=reading.runs,
        bad_runs=reading.bad_runs,
        first_run=_index(reading.first_run),
        order=_index(reading.first),
    )


def _index(value: int) -> int | None:
    return None if value == NEVER else value
