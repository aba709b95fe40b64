"""The range of constant arrays: what a 16-bit dtype would turn into infinity."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import Tracer


class ConstantRange:
    """The range of a constant array, computed when first asked.

    Two are equal if they exceed the same dtypes and are both within [-1, 1] or both not, so that
    plans are shared between constants.
    """

    __slots__ = ("_found", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._found: tuple[frozenset[np.dtype], bool] | None = None

    def exceeds(self) -> frozenset[np.dtype]:
        """Returns the compute dtypes in which a finite element becomes infinite."""
        return self._find()[0]

    def is_within_one(self) -> bool:
        """Returns whether all finite elements are within [-1, 1]."""
        return self._find()[1]

    def _find(self) -> tuple[frozenset[np.dtype], bool]:
        if self._found is None:
            self._found, self._value = _range_of(np.asarray(self._value)), None
        return self._found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantRange) and self._find() == other._find()

    def __hash__(self) -> int:
        return hash(self._find())


def _range_of(array: np.ndarray) -> tuple[frozenset[np.dtype], bool]:
    if not array.size:
        return frozenset(), True
    # Two passes over the array in NumPy, without a copy; most constants are never asked.
    largest = max(abs(array.min()), abs(array.max()))
    if not np.isfinite(largest):
        finite = np.abs(array[np.isfinite(array)])
        largest = finite.max() if finite.size else array.dtype.type(0)
    with np.errstate(over="ignore"):
        exceeds = frozenset(d for d in COMPUTE_DTYPES if not np.isfinite(largest.astype(d)))
    return exceeds, bool(largest <= 1)


def constant_range(value: Any) -> ConstantRange | None:
    """Returns the range of a float32 constant; a tracer has no values to look at."""
    if isinstance(value, Tracer) or getattr(value, "dtype", None) != FLOAT32:
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return ConstantRange(value)
