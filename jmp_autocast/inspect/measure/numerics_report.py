"""`NumericsReport`: what the equations of a program made, in one run of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import starmap
from typing import Any, ClassVar

import jax
import numpy as np

from ..export import NOT_EXPORTED, Exported, counted, cut, place, rest, table
from .measured import MeasuredEquation, each_reading
from .numerics_probe import INFINITY, NEVER, Reading

# Twenty rows fit on a screen. The report holds all.
_SHOWN = 20

_PASSED_ON = "the infinity or NaN of a result: an argument holds one"

# Over mapped axes these are no sums. The earliest fault of all is the one to look at.
_EXTREMES = {"largest": np.max, "smallest": np.min, "first_run": np.min, "first": np.min}


@dataclasses.dataclass(frozen=True, slots=True)
class NumericsRow(MeasuredEquation):
    """What one equation made. All fields are strings, numbers and tuples of them.

    A fault is a NaN made from operands without one, or an infinity made from finite operands; in
    mode ``"overflow"`` also a value beyond float16's range.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        inside: The loops, branches and device maps around it, outermost first.
        backward: It belongs to a backward pass that JAX made.
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
        bad_runs: The number of runs that made a fault.
        first_run: The first run that made a fault, counted from 0; None if no run did.
        order: How many equations had run before that run; None if no run made a fault.

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
        """The number of values that it made, over all runs.

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
    """What `jmp_autocast.check_numerics` returns beside the result.

    It is a pytree, so that a jitted function may return it. Under ``vmap`` and ``shard_map`` the
    rows sum over the mapped axis. Readings stay arrays until somebody asks for rows, so that a
    report costs no transfer from the device where nobody looks at it.

    Args:
        name: The function's name.
        mode: The mode of the check.
        equations: The equations that were measured.
        readings: What each has made, as arrays with an element per equation.
        passed_on: Whether a NaN of an argument reaches a result, or an infinity a scalar one.

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
        """A row per equation that makes floats, in program order.

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
        """The rows that made a fault, the earliest fault first.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import check_numerics
            >>> f = lambda x: jnp.log(x) - jnp.log(x)
            >>> _, report = check_numerics(f, mode="collect")(jnp.zeros(4))
            >>> [(row.primitive, row.inf, row.nan) for row in report.bad]
            [('log', 4, 0), ('log', 4, 0), ('sub', 0, 4)]
        """
        # A NaN spreads through all that follows. Who made it is the fault that came first.
        found = [row for row in self.rows if row.order is not None]
        return sorted(found, key=lambda row: row.order or 0)

    @property
    def first(self) -> NumericsRow | None:
        """The row that made the first fault, None if there is no fault.

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
            what = "nothing beyond float16's range" if overflow else "all is finite"
            if any(row.nan or row.inf for row in rows):
                what = "none makes an infinity or NaN that no operand holds"
            if np.any(self.passed_on):
                what = f"none makes {_PASSED_ON}"
            return cut(f"{self.name}: {of}, {what}")
        what = "what a float16 cannot hold" if overflow else "an infinity or NaN"
        return cut(f"{self.name}: {what}, made by {len(bad)} of {of}")

    def __str__(self) -> str:
        """Returns the summary, the faults in the order in which they arose, and the extremes.

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
            where = place(row.primitive, ",".join(row.dtypes), row.scope, source=row.source)
            return [row.largest, row.smallest, _share(row.zero, row), _share(row.small, row), where]

        # The range of a dtype is what a program outgrows: the largest values come first.
        ordered = sorted(self.rows, key=lambda row: -row.largest)
        more = "more; report.rows holds all"
        lines += ["", *table({**columns, "equation": ""}, ordered, cells, _SHOWN, more)]
        return "\n".join(lines)


def bad_message(name: str, row: NumericsRow) -> str:
    """Returns the text of the error about the first fault.

    Args:
        name: The function's name.
        row: The row of the equation.
    """
    first, *rest = _lines(row)
    fix = (
        "check_numerics(..., mode='collect') has the range of every value; full_precision() or "
        "A rule of the policy for its scope keeps a region in float32."
    )
    return "\n".join([f"{name}: {first}", *rest, fix])


def passed_message(name: str, arguments: Sequence[str]) -> str:
    """Returns the text of the error about a result that is not finite because an argument is not.

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
    # One row counts all results of an equation: all their types are named.
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
    """Sums over the axes that ``vmap`` has put in front of the equations' own."""
    axes = tuple(range(reading.runs.ndim - 1))

    def over(path: Any, x: Any) -> Any:
        name = path[-1].name
        if name in _EXTREMES:
            return _EXTREMES[name](x, axis=axes)
        # A sum in 64 bits, which stops where the counts on the device stop.
        return np.minimum(np.sum(x, axis=axes, dtype=np.uint64), NEVER)

    return jax.tree_util.tree_map_with_path(over, reading)


def _row(equation: MeasuredEquation, reading: Reading) -> NumericsRow:
    # Mode "raise" leaves all but NaNs and infinities out: then the row is that of no value.
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
