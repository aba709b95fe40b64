"""Which values a plan casts, and which of them have 16 bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...policies import FLOAT_DTYPES
from ..compat import is_array_aval


@functools.lru_cache(4096)
def float_dtype(aval: Any) -> np.dtype | None:
    """Returns the dtype of an array that autocast may cast, None for anything else.

    Args:
        aval: The type of a value.
    """
    dtype = getattr(aval, "dtype", None)
    return dtype if dtype in FLOAT_DTYPES and is_array_aval(aval) else None


def is_16_bit(dtype: np.dtype | None) -> bool:
    """Returns whether a dtype is float16 or bfloat16; False for None, which is no float."""
    return dtype is not None and dtype.itemsize == 2
