"""The dtypes that a policy may name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32 = np.dtype(np.float32)
COMPUTE_DTYPES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))


def as_dtype(value: Any, argument: str) -> np.dtype:
    """Returns the dtype meant by ``value``.

    Args:
        value: A dtype, a scalar type or a name. NumPy would also take None, for float64, and
            arrays, for their own.
        argument: The argument's name, for the message.

    Raises:
        ValueError: No dtype is meant by it.

    Example:
        >>> as_dtype("bfloat16", "compute_dtype")
        dtype(bfloat16)
    """
    error = None
    # An array in place of a dtype is a forgotten keyword: `autocast(fn, x)`.
    if value is not None and not isinstance(value, jax.Array):
        try:
            return np.dtype(jnp.dtype(value))
        except TypeError as not_a_dtype:
            error = not_a_dtype
    raise ValueError(
        f"{argument} must be a dtype, got {value!r}. Pass one such as jnp.bfloat16, or its name, "
        "'bfloat16'."
    ) from error


def as_float_dtype(value: Any, argument: str) -> np.dtype:
    """Returns float32, float16 or bfloat16.

    Raises:
        ValueError: Another dtype is meant by ``value``, or none.

    Example:
        >>> as_float_dtype("float32", "output_dtype")
        dtype('float32')
    """
    dtype = as_dtype(value, argument)
    if dtype not in (FLOAT32, *COMPUTE_DTYPES):
        raise ValueError(f"{argument} must be float32, float16 or bfloat16, got {dtype.name}.")
    return dtype


def as_compute_dtype(value: Any) -> np.dtype:
    """Returns the compute dtype meant by ``value``.

    Raises:
        ValueError: It is neither float16 nor bfloat16.

    Example:
        >>> as_compute_dtype("float16")
        dtype('float16')
    """
    dtype = as_dtype(value, "compute_dtype")
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"compute_dtype must be float16 or bfloat16, got {dtype.name}. To run without casts, "
            "pass enabled=False."
        )
    return dtype
