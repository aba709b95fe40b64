"""Which values a plan casts, and which of them are narrower than the program declares."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...policies import domain
from ..compat import is_array_aval


@functools.lru_cache(4096)
def float_dtype(aval: Any, wide: np.dtype) -> np.dtype | None:
    """Returns the dtype of an array that autocast may cast, None for anything else.

    Args:
        aval: The type of a value.
        wide: The wide dtype of the policy: beside float32 those arrays are float32, float16 and
            bfloat16 ones, beside float64 float64 and float32 ones.
    """
    dtype = getattr(aval, "dtype", None)
    return dtype if dtype in domain(wide) and is_array_aval(aval) else None


def is_in(dtype: np.dtype | None, *dtypes: np.dtype | None) -> bool:
    """Returns whether a dtype, None for what is no float, is one of several.

    To NumPy ``np.dtype("float64") == None`` is true, and so is ``in (None,)``.

    Example:
        >>> is_in(np.dtype("float64"), None), is_in(None, np.dtype("float64")), is_in(None, None)
        (False, False, True)
    """
    if dtype is None:
        return any(other is None for other in dtypes)
    return any(other is not None and other == dtype for other in dtypes)


def is_narrower(dtype: np.dtype | None, wide: np.dtype) -> bool:
    """Returns whether a value of a dtype was, or is, rounded from the wide dtype; False for None.

    In an island a value may be wider than the wide dtype of the policy.
    """
    return dtype is not None and dtype.itemsize < wide.itemsize
