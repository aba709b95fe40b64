"""The range of constant arrays: which elements a 16-bit dtype would turn into infinity."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ...policies import COMPUTE_DTYPES, FLOAT32
from ..compat import Tracer
from ..primitives.clamped_cast import clamped, is_clamped

NEAR = 4.0
"""A number up to this costs what values of its size are rounded by anyway: layers add 3
(hard_swish), and at 10 the error of a 16-bit sum was 2.5 to 4 times that of a float32 sum."""

BOUND = 2.0**15
"""What clips above this is there against overflow."""

_MAX_SIZE = 2**18
"""A constant of more elements is a weight: no guard searches it for a stencil or a grid."""


class _Found(NamedTuple):
    exceeds: frozenset[np.dtype]
    is_within_one: bool
    is_clamped: bool
    rounds: frozenset[np.dtype]
    is_stencil: bool
    is_even: bool
    has_both_signs: bool
    holds_whole: frozenset[np.dtype] | None = None


class ConstantRange:
    """The range of a constant array, computed lazily.

    Two ranges are equal if their attributes are, so that plans are shared between constants.
    """

    __slots__ = ("_found", "_is_small", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._is_small = np.size(value) <= _MAX_SIZE
        self._found: _Found | None = None

    def exceeds(self) -> frozenset[np.dtype]:
        """Returns the compute dtypes in which a finite element becomes infinite.

        bfloat16 is none of them: its copy is clamped, as a literal is (`clamped_cast`).
        """
        return self._find().exceeds

    def is_within_one(self) -> bool:
        """Returns whether all finite elements are within [-1, 1]."""
        return self._find().is_within_one

    def rounds(self) -> frozenset[np.dtype]:
        """Returns the compute dtypes that round an element between `NEAR` and `BOUND`."""
        return self._find().rounds

    def is_clamped(self) -> bool:
        """Returns whether a finite element is known to be beyond the largest bfloat16 number.

        Weights are not searched: a weight without a range is an operand of products, and a product
        with 3.4e38 exceeds float32 as well.
        """
        return self._found is not None and self._found.is_clamped

    def is_stencil(self) -> bool:
        """Returns whether its elements, or those of each filter in it, add up to 0."""
        return self._is_small and self._find().is_stencil

    def is_even(self) -> bool:
        """Returns whether four or more elements along an axis are evenly spaced: positions."""
        return self._is_small and self._find().is_even

    def has_both_signs(self) -> bool:
        """Returns whether some elements are positive and some negative: no average."""
        return self._is_small and self._find().has_both_signs

    def holds_whole(self) -> frozenset[np.dtype] | None:
        """Returns the compute dtypes that hold its elements, None where some have a fraction."""
        return self._find().holds_whole if self._is_small else None

    def _find(self) -> _Found:
        if self._found is None:
            self._found, self._value = _range_of(np.asarray(self._value)), None
        return self._found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantRange) and self._find() == other._find()

    def __hash__(self) -> int:
        return hash(self._find())


def _range_of(array: np.ndarray) -> _Found:
    if not array.size:
        return _Found(frozenset(), True, False, frozenset(), False, False, False)
    shaped = array
    # Two passes over the array in NumPy, without a copy; most ranges are never computed.
    array = array.reshape(-1)  # an array without dimensions has no slices
    largest = max(abs(array.min()), abs(array.max()))
    if not np.isfinite(largest):
        finite = np.abs(array[np.isfinite(array)])
        largest = finite.max() if finite.size else array.dtype.type(0)
    exceeds = frozenset(d for d in COMPUTE_DTYPES if not np.isfinite(clamped(largest, d)))
    beyond = any(is_clamped(float(largest), d) for d in COMPUTE_DTYPES)
    far = array[(array > NEAR) & (array <= BOUND)] if largest > NEAR else array[:0]
    rounds = frozenset(d for d in COMPUTE_DTYPES if (far.astype(d) != far).any())
    is_small = array.size <= _MAX_SIZE and bool(np.isfinite(array).all())
    stencil = is_small and _is_stencil(shaped.astype(np.float64))
    even = is_small and _is_even(shaped.astype(np.float64))
    whole = is_small and bool((np.rint(array) == array).all())
    with np.errstate(over="ignore"):
        held = [d for d in COMPUTE_DTYPES if (array.astype(d) == array).all()] if whole else None
    holds_whole = None if held is None else frozenset(held)
    signs = bool(array.min() < 0 < array.max())
    return _Found(exceeds, bool(largest <= 1), beyond, rounds, stencil, even, signs, holds_whole)


def _is_stencil(array: np.ndarray) -> bool:
    """Whether an array adds up to 0, as a whole, or each row or column of a matrix does.

    In a bank of filters one is enough: the other filters of a wavelet are averages.
    """
    if array.ndim < 2:
        return bool(_adds_up_to_0(array.reshape(1, -1)).all())
    columns = [_adds_up_to_0(np.moveaxis(array, k, 0).reshape(array.shape[k], -1)) for k in (0, -1)]
    if array.ndim > 2:
        return bool(any(found.any() for found in columns))
    return bool(any(found.all() for found in columns))


def _adds_up_to_0(rows: np.ndarray) -> np.ndarray:
    size = np.abs(rows).sum(-1)
    # A random row of n numbers adds up to 1 / sqrt(n) of its size; float32 rounds by 2**-24 of it.
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
    """Returns the range of a float32 constant; a tracer has no values to look at."""
    if isinstance(value, Tracer) or getattr(value, "dtype", None) != FLOAT32:
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return ConstantRange(value)
