"""Whether 16 bits make a program faster on the default device: a roofline of its products.

A product takes as long as its arithmetic or as its bytes, whichever is longer (Williams, Waterman
and Patterson, *Roofline*, Communications of the ACM 52 (2009)). That is the time at best: launches,
and rates that nobody reaches, come on top in either precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ...backend import (
    Choice,
    Device,
    Rates,
    choose_for,
    has_float8_units,
    has_microscaling_units,
    rates_of,
)
from ...policies import CONTRACTIONS, E2M1, E4M3, FLOAT32
from .rows import Row, note_on_sizes
from .totals import is_low, item_size


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What the rates of a device say of a program's matmuls and convolutions.

    Args:
        device: The kind of the default device.
        intensity: FLOPs of products for each byte of their operands and results, in the dtypes that
            they run in; 0 of none.
        balance: The intensity from which on the arithmetic of 16-bit products takes longer than
            their bytes; None where the rates are not known.
        speedup: How much faster the products are than in float32, at most; None as above.
        says: All that in words.
        source: Where the rates are from, ``""`` where they are not known.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> roofline = explain(jnp.matmul, jnp.ones((8, 8)), jnp.ones((8, 8)), policy=BF16).roofline
        >>> round(roofline.intensity, 2)
        2.67
    """

    device: str
    intensity: float
    balance: float | None
    speedup: float | None
    says: str
    source: str


def roofline_of(rows: Sequence[Row], device: Device, wide: np.dtype) -> Roofline | None:
    """Returns the roofline of a program's products.

    Args:
        rows: The rows of its report.
        device: The device that it would run on.
        wide: The wide dtype of the policy.

    Returns:
        None for a program in float64, of which no rates are known here, and for one with symbolic
        sizes.
    """
    products = [row for row in rows if row.primitive in CONTRACTIONS]
    flops, nbytes = (sum(getattr(row, name) for row in products) for name in ("flops", "nbytes"))
    if wide != FLOAT32 or note_on_sizes(rows):
        return None
    intensity, rates = flops / nbytes if nbytes else 0.0, rates_of(device)
    if not products:
        says = "no matmul or convolution: 16 bits save bytes alone"
        return Roofline(device.kind, 0.0, None, None, says, "")
    if rates is None:
        choice = choose_for(device)
        known = choice.reason if choice.dtype is None else f"{choice.reason}, at an unknown rate"
        says = f"unknown device {device.kind}: {known}"
        if device.platform == "cpu":
            says = _on_a_cpu(choice, {name for row in products for name in row.operands[:2]})
        return Roofline(device.kind, intensity, None, None, says, "")
    speeds = _speeds(rates, device)
    before, after = (_seconds(products, rates, x) for x in ({}, speeds))
    balance = rates.low / rates.nbytes
    limit = "arithmetic" if intensity > balance else "memory"
    says = (
        f"products at most {before / after:.2g} times as fast on {device.kind}: limited by {limit} "
        f"({intensity:.3g} FLOPs a byte, balanced at {balance:.3g})"
    )
    return Roofline(device.kind, intensity, balance, before / after, says, rates.source)


def _on_a_cpu(choice: Choice, dtypes: set[str]) -> str:
    if choice.dtype is None:
        return f"not faster on this CPU: {choice.reason}"
    if choice.dtype.name not in dtypes and any(is_low(name, FLOAT32) for name in dtypes):
        return f"not faster on this CPU, which multiplies {choice.dtype} alone: {choice.reason}"
    return f"faster on this CPU, at an unknown rate: {choice.reason}"


def _speeds(rates: Rates, device: Device) -> dict[str, float]:
    """Returns the rates of the dtypes that a device multiplies faster than float32."""
    speeds = {"float16": rates.low}
    if choose_for(device).dtype == jnp.bfloat16:
        speeds["bfloat16"] = rates.low
    if has_float8_units(device):
        speeds[E4M3.name] = 2 * rates.low  # as the vendors' tables say of all that have them
    if has_microscaling_units(device):
        speeds[E2M1.name] = 4 * rates.low
    return speeds


def _seconds(products: Sequence[Row], rates: Rates, speeds: Mapping[str, float]) -> float:
    """Returns how long products take at best: in float32, or in their dtypes at these rates."""
    total = 0.0
    for row in products:
        rate = min(speeds.get(name, rates.full) for name in row.operands[:2])
        names = (*row.operands, *row.results)
        shapes = (*row.operand_shapes, *row.result_shapes)
        sizes = [item_size(name) if speeds or not is_low(name, FLOAT32) else 4 for name in names]
        nbytes = row.times * sum(n * math.prod(x) for n, x in zip(sizes, shapes, strict=True))
        total += max(row.flops / rate, nbytes / rates.nbytes)
    return total
