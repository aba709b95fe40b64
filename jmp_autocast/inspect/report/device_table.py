"""Devices beside each other: as lines of a report, and as tables of its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..export import scaled, table, timed
from .roofline import DeviceTime, Roofline, ScopeTime
from .rows import SHORT

# A screen: a program has some ten scopes, once those of layers are one.
_SHOWN = 12

_DEVICES = (
    "device, gain, limited by, dtype, 16 bits, float8, by default, multiplies, TF32, float32, "
    "wire, outcome, source, date"
)
_SECONDS = "float32", "default", "low", "float8", "wire"
_SCOPES = "device, scope, products, by default, 16 bits, limited by, because"
_WIRE = "collective, dtype, devices, times, bytes, bytes in float32"


def device_lines(devices: Sequence[DeviceTime], roofline: Roofline | None) -> list[str]:
    """Returns the lines of two tables: devices, and what gains nothing on the first of them.

    Args:
        devices: What the program takes on each.
        roofline: The device that the program is explained for.
    """
    columns = {"device": "18", "float32": ">8", "default": ">8", "in": "4", "16 bits": ">8"}
    columns |= {"in ": "4", "float8": ">8", "wire": ">8", "gain": ">5", "limited by": ""}
    lines = table(columns, devices, _cells)
    chosen = next((d for d in devices if roofline and d.device == roofline.device), None)
    if chosen and chosen.no_gain:
        columns = {"products": ">9", "16 bits": ">8", f"no gain on {chosen.device}": "34"}
        columns["because"] = ""
        more = "more; DeviceTime.no_gain has all"
        lines += ["", *table(columns, chosen.no_gain, _scope_cells, _SHOWN, more)]
    return [*lines, ""] if devices else []


def _cells(time: DeviceTime) -> list[Any]:
    gain = "-" if time.speedup is None else f"{time.speedup:.2g}"
    full, default, low, eight, wire = map(timed, [getattr(time, f"{x}_seconds") for x in _SECONDS])
    multiplies, dtype = (SHORT.get(name, name) for name in (time.multiplies, time.dtype or "-"))
    limit = time.limit or time.says
    return [time.device, full, default, multiplies, low, dtype, eight, wire, gain, limit]


def _scope_cells(scope: ScopeTime) -> list[Any]:
    name = scope.scope or "no scope"
    return [scaled(scope.products), timed(scope.low_seconds), name, scope.because]
