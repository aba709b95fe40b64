"""The dtypes that a policy may name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32 = np.dtype(np.float32)
COMPUTE_DTYPES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))
# The dtypes between which values are cast. A float64 or float8 value stays what it is: its author
# chose more, or fewer, than the 24 bits of float32 on purpose.
FLOAT_DTYPES = frozenset((FLOAT32, *COMPUTE_DTYPES))
SHORT_NAMES = {
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
}
"""What jmp, jaxprs and PyTorch users call the three dtypes; read wherever a dtype is named."""


def find_dtype(value: Any) -> np.dtype | None:
    """Returns the dtype meant by a dtype, a scalar type or a name, None where none is meant.

    Example:
        >>> find_dtype("bfloat16"), find_dtype("bf16"), find_dtype("bf17")
        (dtype(bfloat16), dtype(bfloat16), None)
    """
    # NumPy takes None for float64, and an array for its own dtype. Here either of them is a
    # mistake: an array in place of a dtype is a forgotten keyword, as in `autocast(fn, x)`.
    if value is None or isinstance(value, jax.Array):
        return None
    name = SHORT_NAMES.get(value, value) if isinstance(value, str) else value
    try:
        return np.dtype(jnp.dtype(name))
    except TypeError:
        return None


def as_dtype(value: Any, argument: str) -> np.dtype:
    """Returns the dtype meant by ``value``.

    Args:
        value: A dtype, a scalar type or a name.
        argument: The argument's name, for the message.

    Raises:
        ValueError: No dtype is meant by it.

    Example:
        >>> as_dtype("bfloat16", "compute_dtype")
        dtype(bfloat16)
    """
    dtype = find_dtype(value)
    if dtype is None:
        raise ValueError(
            f"{argument} must be a dtype, got {value!r}. Pass one such as jnp.bfloat16, or its "
            "name, 'bfloat16'."
        )
    return dtype


def as_float_dtype(value: Any, argument: str) -> np.dtype:
    """Returns float32, float16 or bfloat16.

    Raises:
        ValueError: Another dtype is meant by ``value``, or none.

    Example:
        >>> as_float_dtype("float32", "output_dtype")
        dtype('float32')
    """
    dtype = as_dtype(value, argument)
    if dtype not in FLOAT_DTYPES:
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
