"""Finds the dtype of a value that autocast may cast, and its size, which may be symbolic."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeGuard

import numpy as np

from ...policies import FLOAT_DTYPES
from ..compat import Atom, InconclusiveDimensionOperation, aval_of, is_array_aval


@functools.lru_cache(4096)
def float_dtype(aval: Any) -> np.dtype | None:
    """Returns the dtype of a float array that autocast may cast, None for any other value.

    Args:
        aval: The type of a value.
    """
    dtype = getattr(aval, "dtype", None)
    return dtype if dtype in FLOAT_DTYPES and is_array_aval(aval) else None


def is_16_bit(dtype: np.dtype | None) -> TypeGuard[np.dtype]:
    """Returns whether a dtype is float16 or bfloat16; False for None."""
    return dtype is not None and dtype.itemsize == 2


def element_count(atom: Atom) -> Any:
    """Returns the number of elements of a variable or literal: an int, or a symbolic expression.

    Example:
        >>> import jax
        >>> element_count(jax.make_jaxpr(lambda x: x)(jax.numpy.ones((2, 3))).jaxpr.invars[0])
        6
    """
    return math.prod(aval_of(atom).shape)


def at_least(one: Any, other: Any) -> bool:
    """Returns whether a size is at least another one for all values of its symbolic dimensions.

    Example:
        >>> from jax.export import symbolic_shape
        >>> (b,) = symbolic_shape("b")
        >>> at_least(3, 2), at_least(4 * b, b), at_least(b, b * b)
        (True, True, False)
    """
    try:
        return bool(one >= other)
    except InconclusiveDimensionOperation:
        return False


def is_as_large(atom: Atom, other: Any) -> bool:
    """Returns whether a variable or literal has at least as many elements as another."""
    return at_least(element_count(atom), element_count(other))
