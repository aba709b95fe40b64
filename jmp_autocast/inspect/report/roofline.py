"""Whether 16 bits make a program faster on a device: a roofline of its products and collectives.

A product takes as long as its arithmetic or as its bytes, whichever is longer (Williams, Waterman
and Patterson, *Roofline*, Communications of the ACM 52 (2009)), and as long as a kernel takes at
least. That is the time at best: rates that nobody reaches come on top in either precision. What is
no product is fused into them, or moves bytes as well: it is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...backend import (
    Hardware,
    choose_for,
    device_of,
    hardware_of,
)
from ...devices import Device
from ...policies import CONTRACTIONS, E4M3
from .products import EIGHT, FULL, LOW, PLANNED, Products, nbytes_in, products_of
from .rows import Row
from .totals import is_low
from .wire import Wire

LIMITS = ("arithmetic", "memory", "launches")
_GAIN = 1.05
"""What is not that much faster is no gain: rates that are reached differ by more."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What the rates of a device say of a program's matmuls and convolutions.

    Args:
        device: The device.
        intensity: FLOPs of products for each byte of their operands and results, in the dtypes that
            they run in; 0 of none.
        balance: The intensity from which on the arithmetic of 16-bit products takes longer than
            their bytes; None where the rates are not known.
        speedup: How much faster the program is than in float32, at most; None as above.
        says: All that in words.
        source: Where the rates are from, ``""`` where they are not known.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> roofline = explain(jnp.matmul, jnp.ones((8, 8)), jnp.ones((8, 8)), policy=BF16).roofline
        >>> round(roofline.intensity, 2)
        1.6
    """

    device: str
    intensity: float
    balance: float | None
    speedup: float | None
    says: str
    source: str


@dataclasses.dataclass(frozen=True)
class ScopeTime:
    """The products of a scope on a device.

    Args:
        scope: The scope; of those that differ by a number alone, as those of layers, all together.
        products: How many there are, and how often they run.
        default_seconds: What they take at best in float32, as XLA multiplies it by default.
        low_seconds: What they take in 16 bits.
        limit: What limits them in 16 bits: ``"arithmetic"``, ``"memory"`` or ``"launches"``.
        because: Why they gain nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import explain
        >>> small = jnp.ones((4, 4))
        >>> (time,) = explain(jnp.matmul, small, small, device="h100").devices
        >>> [(each.limit, each.because) for each in time.no_gain]
        [('launches', 'too small: a kernel takes 2 us at least')]
    """

    scope: str
    products: int
    default_seconds: float
    low_seconds: float
    limit: str
    because: str


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """What the products of a program take on a device at best, by its rates.

    Args:
        device: The device.
        dtype: The 16-bit dtype that it multiplies, ``""`` where it gains by neither.
        multiplies: In what XLA multiplies float32 by default there.
        float32_seconds: The products in float32, where that is asked for: ``Precision.HIGHEST``.
        default_seconds: In float32 as XLA multiplies it by default.
        tf32_seconds: In TF32; None without units for it.
        low_seconds: Those that the plan lowers in 16 bits.
        float8_seconds: Those of large matrices in 8 bits, as ``matmul="float8"`` lowers them; None
            without units for them.
        default_wire_seconds: The collectives in float32, None where there are none, or the rate of
            the links is not known.
        wire_seconds: The collectives in the dtypes of the plan.
        speedup: How much faster 16 bits are at most; the wire counts where it takes longest.
        limit: What limits the program in 16 bits: ``"arithmetic"``, ``"memory"``, ``"launches"`` or
            ``"wire"``.
        says: The outcome in words: the gain, or why there is none.
        no_gain: The scopes whose products 16 bits make no faster, those that take longest first.
        source: Where the rates are from.
        date: When they were written down.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain
        >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
        >>> times = explain(jnp.matmul, x, x, device=("v5e", "t4")).devices
        >>> [(time.device, time.dtype, time.multiplies, round(time.speedup, 1)) for time in times]
        [('TPU v5e', 'bfloat16', 'bfloat16', 1.0), ('T4', 'float16', 'float32', 8.0)]
    """

    device: str
    dtype: str
    multiplies: str
    float32_seconds: float | None = None
    default_seconds: float | None = None
    tf32_seconds: float | None = None
    low_seconds: float | None = None
    float8_seconds: float | None = None
    default_wire_seconds: float | None = None
    wire_seconds: float | None = None
    speedup: float | None = None
    limit: str = ""
    says: str = ""
    no_gain: tuple[ScopeTime, ...] = ()
    source: str = ""
    date: str = ""


class Times(NamedTuple):
    """What the products of a program take on a device.

    Args:
        parts: Seconds by each limit, of each product.
        total: Seconds of all.
        limit: What most of the time is limited by.
    """

    parts: np.ndarray
    total: float
    limit: str


def _times(products: Products, device: Device, way: str, full: str = "") -> Times:
    """Returns what products take in one of the ways.

    Args:
        products: The products.
        device: The device.
        way: One of the ways.
        full: In what float32 is multiplied, ``""`` for what XLA does by default.
    """
    rates = {name: _rate(device, name, full) for name in set(products.dtypes[way])}
    arithmetic = products.flops / np.array([rates[name] for name in products.dtypes[way]])
    memory = products.nbytes[way] / (device.memory or math.inf)
    parts = np.stack([arithmetic, memory, device.launch * products.times])
    longest = parts.max(axis=0)
    return Times(parts, float(longest.sum()), _limit(parts))


def _limit(parts: np.ndarray) -> str:
    """Returns what most of the time of products is limited by."""
    sums = np.bincount(parts.argmax(axis=0), parts.max(axis=0), len(LIMITS))
    return LIMITS[int(sums.argmax())]


def _rate(device: Device, name: str, full: str = "") -> float:
    """Returns the FLOPs a second of products in a dtype: of those without units float32's."""
    default = device.rate(full or device.multiplies) or 0.0
    low = (device.rate(device.low) or default) if device.low else default
    eight = device.float8 or (low if name == EIGHT else default)
    rates = {FULL: default, LOW: low, EIGHT: eight, E4M3.name: eight}
    for dtype in ("bfloat16", "float16"):
        rates[dtype] = device.rate(dtype) or default
    return rates.get(name, default)


def seconds_saved(rows: Sequence[Row], device: Device) -> list[float]:
    """Returns by how much less time each equation takes at best than in float32.

    What is no product counts by its bytes: fused into what reads it, it saves none of them.

    Args:
        rows: The rows of a program's report.
        device: The device.
    """
    products = products_of(rows, {})
    full, planned = (_times(products, device, way).parts.max(0) for way in (FULL, PLANNED))
    of_products = iter((full - planned).tolist())
    memory = device.memory or math.inf
    return [
        next(of_products)
        if row.primitive in CONTRACTIONS
        else (nbytes_in(row, FULL) - row.nbytes) / memory
        for row in rows
    ]


def why_no_gain(rows: Sequence[Row], device: Device) -> str:
    """Returns why 16 bits make a program no faster on a device, "" where they do.

    Args:
        rows: The rows of its report.
        device: The device.
    """
    products = products_of(rows, {})
    if not products.rows:
        return ""
    speedup, _, says = _outcome(products, (), device, PLANNED)
    return says if speedup < _GAIN else ""


def roofline_of(
    products: Products, wire: Sequence[Wire], hardware: Hardware, note: str = ""
) -> Roofline:
    """Returns the roofline of a program as it is planned.

    Args:
        products: Its products.
        wire: Its collectives.
        hardware: The device that it would run on.
        note: What is not known of its collectives.
    """
    device, name = device_of(hardware), hardware.kind
    nbytes = float(products.nbytes[PLANNED].sum())
    intensity = float(products.flops.sum()) / nbytes if nbytes else 0.0
    if not products.rows:
        says = "no matmul or convolution: 16 bits save bytes alone"
        return Roofline(name, 0.0, None, None, says, "")
    if device is None:
        return Roofline(name, intensity, None, None, _unknown(hardware, products), "")
    balance = (device.rate(device.low) or device.default or 0.0) / (device.memory or 1.0)
    speedup, limit, says = _outcome(products, wire, device, PLANNED)
    if speedup >= _GAIN and limit in LIMITS[:2]:
        says += f" ({_whole(intensity)} FLOPs a byte; balance {_whole(balance)})"
    says = "; ".join(filter(None, [says, note]))
    return Roofline(name, intensity, balance, speedup, says, device.source)


def _whole(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _unknown(hardware: Hardware, products: Products) -> str:
    """Returns what to say of a device whose rates are not known."""
    choice = choose_for(hardware)
    if hardware.platform != "cpu":
        known = choice.reason if choice.dtype is None else f"{choice.reason}, at an unknown rate"
        return f"unknown device {hardware.kind}: {known}"
    dtypes = {name for row in products.rows for name in row.operands[:2]}
    if choice.dtype is None:
        return f"not faster on this CPU: {choice.reason}"
    if choice.dtype.name not in dtypes and any(is_low(name) for name in dtypes):
        return f"not faster on this CPU, which multiplies {choice.dtype} alone: {choice.reason}"
    return f"faster, at an unknown rate: {choice.reason}"


def _outcome(
    products: Products, wire: Sequence[Wire], device: Device, way: str
) -> tuple[float, str, str]:
    """Returns how much faster a way is than float32, what limits it, and both in words."""
    before, after = _times(products, device, FULL), _times(products, device, way)
    sent_before, sent_after = (x or 0.0 for x in _seconds_of_wire(wire, device))
    # At best, what is sent is sent while something else is computed. A loop may run no time.
    longest = max(after.total, sent_after)
    speedup = max(before.total, sent_before) / longest if longest else 1.0
    limit = "wire" if sent_after > after.total else after.limit
    if speedup >= _GAIN:
        says = f"at most {speedup:.2g} times as fast on {device.name}: limited by {limit}"
        return speedup, limit, says
    everything = np.ones(len(products.rows), bool)
    because = "the wire takes longest, and sends as many bytes"
    if limit != "wire":
        because = _because(products, device, way, everything, limit)
    return speedup, limit, f"no gain on {device.name}: {because}"


def _because(products: Products, device: Device, way: str, chosen: np.ndarray, limit: str) -> str:
    """Returns why some products gain nothing by 16 bits."""
    if limit == "launches":
        return f"too small: a kernel takes {1e6 * device.launch:.2g} us at least"
    wide = products.wide[chosen].sum()
    if limit == "memory" and wide > 0.2 * products.nbytes[way][chosen].sum():
        return "it reads float32 arguments: cast_params stores 16 bits"
    if limit == "memory":
        return "as many bytes are moved"
    rows = [row for row, is_chosen in zip(products.rows, chosen, strict=True) if is_chosen]
    names = [name for row in rows for name in row.operands[:2]]
    lowered = [name for name in names if is_low(name)]
    if 2 * len(lowered) < len(names):
        reasons = dict.fromkeys(row.reason for row in rows)
        return f"it stays in float32: {', '.join(reasons)}"
    if device.multiplies == device.low:
        return f"it multiplies float32 in {device.low} by default"
    return f"no units for {lowered[0] if way == PLANNED else '16 bits'}"


def _seconds_of_wire(
    wire: Sequence[Wire], device: Device
) -> tuple[float, float] | tuple[None, None]:
    """Returns what the collectives take in float32, and as they are planned."""
    if not wire or not device.link:
        return None, None
    full, planned = sum(x.float32_nbytes for x in wire), sum(x.nbytes for x in wire)
    return full / device.link, planned / device.link


def device_time(products: Products, wire: Sequence[Wire], device: Device) -> DeviceTime:
    """Returns what a program takes on a device.

    Args:
        products: Its products.
        wire: Its collectives.
        device: The device.
    """
    if device.platform == "cpu":
        return _on_the_cpu(products, device)
    before, low = _times(products, device, FULL), _times(products, device, LOW)
    eight = _times(products, device, EIGHT).total if device.float8 else None
    tf32 = _times(products, device, FULL, "tf32").total if device.tf32 else None
    sent = _seconds_of_wire(wire, device)
    speedup, limit, says = _outcome(products, wire, device, LOW)
    return DeviceTime(
        device=device.name,
        dtype=device.low,
        multiplies=device.multiplies,
        float32_seconds=_times(products, device, FULL, FULL).total,
        default_seconds=before.total,
        tf32_seconds=tf32,
        low_seconds=low.total,
        float8_seconds=eight,
        default_wire_seconds=sent[0],
        wire_seconds=sent[1],
        speedup=speedup,
        limit=limit,
        says=says,
        no_gain=tuple(_no_gain(products, device, before, low)),
        source=device.source,
        date=device.date,
    )


def _on_the_cpu(products: Products, device: Device) -> DeviceTime:
    """Returns what is known of the CPU at hand: the kernels that it has, and no rate."""
    hardware = hardware_of(device)
    dtype = choose_for(hardware).dtype
    return DeviceTime(
        device=device.name,
        dtype="" if dtype is None else dtype.name,
        multiplies=device.multiplies,
        says=_unknown(hardware, products),
        source=device.source,
        date=device.date,
    )


def _no_gain(products: Products, device: Device, before: Times, after: Times) -> list[ScopeTime]:
    """Returns the scopes whose products 16 bits make no faster."""
    names, index = np.unique(np.array(products.scopes), return_inverse=True)
    sums = [np.bincount(index, t.parts.max(axis=0), len(names)) for t in (before, after)]
    found = []
    for k in np.flatnonzero(sums[0] < _GAIN * sums[1]):
        chosen = index == k
        limit = _limit(after.parts[:, chosen])
        because = _because(products, device, LOW, chosen, limit)
        times = int(products.times[chosen].sum())
        seconds = (float(sums[0][k]), float(sums[1][k]))
        found.append(ScopeTime(str(names[k]), times, *seconds, limit, because))
    return sorted(found, key=lambda each: -each.low_seconds)
