"""Casts values that are known at trace time to bfloat16 without overflow to infinity.

The masks of Flax and Hugging Face hold ``finfo(float32).min``, which bfloat16 rounds to -inf. If
the mask stayed in float32 instead, a TPU would store the scores of an attention in float32: 1.31
times the traffic of a hand-written 12-layer model whose mask holds the lowest bfloat16 number.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

_BFLOAT16 = np.dtype(jnp.bfloat16)
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def is_clamped(value: float | None, dtype: np.dtype) -> bool:
    """Returns whether the cast of a known value to a dtype is clamped.

    Args:
        value: The value; None if it is unknown. Finite values beyond the largest bfloat16 number
            are clamped.
        dtype: The dtype of the cast. Casts to float16 are never clamped: its range ends at 65,504,
            far below the values of masks.
    """
    return value is not None and dtype == _BFLOAT16 and _LARGEST < abs(value) < np.inf


def clamped(value: Any, dtype: np.dtype) -> np.ndarray:
    """Returns a number as a NumPy array of a dtype, clamped to bfloat16's range if `is_clamped`.

    Args:
        value: A number, or a NumPy array without dimensions.
        dtype: The dtype of the array.

    Example:
        >>> float(clamped(-3.4e38, jnp.dtype("bfloat16")))
        -3.3895313892515355e+38
    """
    array = np.asarray(value)
    if array.dtype.kind == "f" and is_clamped(float(array), dtype):
        array = np.clip(array, -_LARGEST, _LARGEST)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def clamped_array(x: Any) -> Any:
    """Casts an array to bfloat16, in which finite elements stay finite and infinite ones infinite.

    Args:
        x: A float32 array of any shape, or a tracer.

    Example:
        >>> mask = jnp.array([0.0, -jnp.inf, jnp.finfo(jnp.float32).min])
        >>> jnp.isfinite(clamped_array(mask)).tolist()
        [True, False, True]
    """
    low, largest = lax.convert_element_type(x, _BFLOAT16), np.asarray(_LARGEST, _BFLOAT16)
    return lax.select(lax.is_finite(x), lax.clamp(-largest, low, largest), low)
