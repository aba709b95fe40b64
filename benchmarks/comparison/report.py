"""The tables of a comparison with hand-written mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .measure import Measurement
from .variants import BASE

Column = tuple[str, Callable[[Measurement], float | None], str]

_ACTIVATION, _WEIGHT = ("activation",), ("parameter", "gradient")


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _error(group: str) -> Callable[[Measurement], float | None]:
    return lambda m: m.errors.get(group)


def _seconds(name: str) -> Callable[[Measurement], float]:
    return lambda m: m.seconds[name]


# In each of the first tables every number stands with its ratio to the hand-written one.
MEMORY: tuple[Column, ...] = (
    ("residuals MB", lambda m: _mega(m.residuals.nbytes()), ".3f"),
    ("folded MB", lambda m: _mega(m.residuals.folded), ".3f"),
    ("temporary MB", lambda m: _mega(m.temporary), ".2f"),
    ("peak MB", lambda m: _mega(m.peak), ".1f"),
    ("param copies MB", lambda m: _mega(m.residuals.nbytes(parameter=True)), ".3f"),
)
CASTS: tuple[Column, ...] = (
    ("activation casts", lambda m: m.cast_count(*_ACTIVATION), "d"),
    ("their MB", lambda m: _mega(m.cast_bytes(*_ACTIVATION)), ".2f"),
    ("weight casts", lambda m: m.cast_count(*_WEIGHT), "d"),
    ("their MB", lambda m: _mega(m.cast_bytes(*_WEIGHT)), ".2f"),
    ("all casts", lambda m: len(m.casts), "d"),
    ("their MB", lambda m: _mega(sum(cast.nbytes for cast in m.casts)), ".2f"),
    ("HLO converts", lambda m: m.hlo_converts, "d"),
    ("low FLOPs %", lambda m: 100 * m.low_flops, ".1f"),
    ("mixed dots", lambda m: m.mixed_dots, "d"),
)
ERRORS: tuple[Column, ...] = tuple(
    (group, _error(group), ".2e") for group in ("kernels", "biases", "scales", "embeddings", "loss")
)
TIMES: tuple[Column, ...] = (
    ("trace s", _seconds("trace"), ".3f"),
    ("of it plan s", _seconds("plan"), ".3f"),
    ("lower s", _seconds("lower"), ".3f"),
    ("compile s", _seconds("compile"), ".2f"),
    ("step ms", lambda m: 1e3 * m.seconds["step"], ".2f"),
)
TABLES: Mapping[str, tuple[Column, ...]] = {
    "Memory": MEMORY,
    "Casts": CASTS,
    "Relative error of gradients and loss": ERRORS,
    "Time": TIMES,
}


def rows(columns: Sequence[Column], found: Mapping[str, Measurement]) -> list[list[str]]:
    """Returns the cells of a table, its header first.

    A column that no variant has a value for is left out. Behind each value stands its ratio to the
    hand-written variant's, where that has one other than 0.
    """
    shown = [c for c in columns if any(c[1](m) is not None for m in found.values())]
    table = [["", *(title for title, _, _ in shown)]]
    base = found.get(BASE)
    for name, m in found.items():
        cells = [name]
        for _, value_of, form in shown:
            value = value_of(m)
            if value is None:
                cells.append("")
                continue
            reference = None if base is None else value_of(base)
            ratio = f" ({value / reference:.2f})" if reference else ""
            cells.append(f"{value:{form}}{ratio}")
        table.append(cells)
    return table
