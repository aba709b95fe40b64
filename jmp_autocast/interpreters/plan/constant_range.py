"""Facts about the elements of constant arrays: range, sums of 0, even spacing, integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import Tracer
from ..primitives.clamped_cast import clamped, is_clamped

NEAR = 4.0
"""A number up to this may be added in 16 bits: the sum is rounded like any value of its size.
Layers add 3 (hard_swish); with 10, the error of a 16-bit sum was 2.5 to 4 times that of float32."""

BOUND = 2.0**15
"""A clip at a larger number guards against overflow, so that the number may be rounded."""

_MAX_SIZE = 2**18
"""A constant of more elements is a weight: no guard searches it for a stencil or a grid."""


class Found(NamedTuple):
    """The facts about the elements of a constant.

    Args:
        exceeds: The compute dtypes in which a finite element becomes infinite. bfloat16 is never
            among them, because bfloat16 copies are clamped (`clamped_cast`).
        is_within_one: All finite elements are within [-1, 1].
        is_clamped: A finite element is beyond the largest bfloat16 number.
        rounds: The compute dtypes that round an element between `NEAR` and `BOUND`.
        is_stencil: Its elements add up to 0; see `_is_stencil`.
        is_even: Four or more elements along an axis are evenly spaced, as positions are.
        has_both_signs: Some elements are positive and some negative, unlike those of an average.
        holds_whole: The compute dtypes that hold all elements exactly; None if an element has a
            fraction.
    """

    exceeds: frozenset[np.dtype] = frozenset()
    is_within_one: bool = True
    is_clamped: bool = False
    rounds: frozenset[np.dtype] = frozenset()
    is_stencil: bool = False
    is_even: bool = False
    has_both_signs: bool = False
    holds_whole: frozenset[np.dtype] | None = None


_NOTHING = Found()


class ConstantRange:
    """The range of a constant array, computed lazily.

    Two ranges are equal if the facts that were found about their arrays are equal, so that
    constants with equal facts share plans.
    """

    __slots__ = ("_found", "_is_small", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._is_small = np.size(value) <= _MAX_SIZE
        self._found: Found | None = None

    @property
    def found(self) -> Found:
        """The facts about all elements, which are searched at the first access."""
        if self._found is None:
            self._found, self._value = _range_of(np.asarray(self._value)), None
        return self._found

    @property
    def small(self) -> Found:
        """The facts about a small array. A larger one is a weight, and is not searched."""
        return self.found if self._is_small else _NOTHING

    def is_clamped(self) -> bool:
        """Returns whether a finite element is known to be beyond the largest bfloat16 number.

        Returns False for a constant that no guard has searched. It is a weight, and the products of
        a weight as large as that (3.4e38) exceed float32, too.
        """
        return self._found is not None and self._found.is_clamped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantRange) and self.found == other.found

    def __hash__(self) -> int:
        return hash(self.found)


def _range_of(array: np.ndarray) -> Found:
    if not array.size:
        return _NOTHING
    # The search takes two passes over the array, without a copy.
    largest = max(abs(array.min()), abs(array.max()))
    if not np.isfinite(largest):
        finite = np.abs(array[np.isfinite(array)])
        largest = finite.max() if finite.size else array.dtype.type(0)
    exceeds = frozenset(d for d in COMPUTE_DTYPES if not np.isfinite(clamped(largest, d)))
    beyond = any(is_clamped(float(largest), d) for d in COMPUTE_DTYPES)
    far = array[(array > NEAR) & (array <= BOUND)]
    rounds = frozenset(d for d in COMPUTE_DTYPES if (far.astype(d) != far).any())
    is_small = array.size <= _MAX_SIZE and bool(np.isfinite(array).all())
    stencil = is_small and _is_stencil(array.astype(np.float64))
    even = is_small and _is_even(array.astype(np.float64))
    whole = is_small and bool((np.rint(array) == array).all())
    with np.errstate(over="ignore"):
        held = [d for d in COMPUTE_DTYPES if (array.astype(d) == array).all()] if whole else None
    holds_whole = None if held is None else frozenset(held)
    signs = bool(array.min() < 0 < array.max())
    return Found(exceeds, bool(largest <= 1), beyond, rounds, stencil, even, signs, holds_whole)


def _is_stencil(array: np.ndarray) -> bool:
    """Whether the elements of an array add up to 0.

    A matrix counts if each row or each column adds up to 0. A bank of filters counts if one filter
    adds up to 0, because the other filters of a wavelet are averages.
    """
    array = array if array.ndim > 1 else array.reshape(1, -1, 1)
    matrices = [np.moveaxis(array, k, 0).reshape(array.shape[k], -1) for k in (0, -1)]
    some = np.any if array.ndim > 2 else np.all
    return any([bool(some(_adds_up_to_0(matrix))) for matrix in matrices])


def _adds_up_to_0(rows: np.ndarray) -> np.ndarray:
    size = np.abs(rows).sum(-1)
    # The limit is above float32's rounding, 2**-24 of the sum of magnitudes, and below the sum of a
    # random row of n numbers, about 1 / sqrt(n) of the sum of magnitudes.
    return (np.abs(rows.sum(-1)) <= 2.0**-20 * size) & (size > 0)


def _is_even(array: np.ndarray) -> bool:
    """Whether four or more elements along an axis are evenly spaced, with equal spacings."""
    for k in range(array.ndim):
        if array.shape[k] < 4:
            continue
        steps = np.diff(array, axis=k)
        spread = np.abs(array).max() * 2.0**-20
        if np.abs(steps).max() > spread and (np.ptp(steps, axis=k) <= spread).all():
            return True
    return False


def constant_range(value: Any) -> ConstantRange | None:
    """Returns the range of a float32 constant, None for a value whose elements cannot be read."""
    if isinstance(value, Tracer) or getattr(value, "dtype", None) != FLOAT32:
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return ConstantRange(value)
