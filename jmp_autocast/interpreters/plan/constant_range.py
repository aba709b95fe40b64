"""The range of constant arrays: what a 16-bit dtype would turn into infinity."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import Tracer


class ConstantRange:
    """The range of a constant array, computed when first asked.

    Two are equal if they exceed the same dtypes, so that plans are shared between constants.
    """

    __slots__ = ("_exceeds", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._exceeds: frozenset[np.dtype] | None = None

    def exceeds(self) -> frozenset[np.dtype]:
        """Returns the compute dtypes in which a finite element becomes infinite."""
        if self._exceeds is None:
            self._exceeds, self._value = _exceeded_dtypes(np.asarray(self._value)), None
        return self._exceeds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantRange) and self.exceeds() == other.exceeds()

    def __hash__(self) -> int:
        return hash(self.exceeds())


def _exceeded_dtypes(array: np.ndarray) -> frozenset[np.dtype]:
    if not array.size:
        return frozenset()
    # Two passes over the array in NumPy, without a copy; most constants are never asked.
    largest = max(abs(array.min()), abs(array.max()))
    if not np.isfinite(largest):
        finite = np.abs(array[np.isfinite(array)])
        largest = finite.max() if finite.size else array.dtype.type(0)
    with np.errstate(over="ignore"):
        return frozenset(d for d in COMPUTE_DTYPES if not np.isfinite(largest.astype(d)))


def constant_range(value: Any) -> ConstantRange | None:
    """Returns the range of a float32 constant; a tracer has no values to look at."""
    if isinstance(value, Tracer) or getattr(value, "dtype", None) != FLOAT32:
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return ConstantRange(value)
