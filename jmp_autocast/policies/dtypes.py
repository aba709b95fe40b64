"""The dtypes that a policy may name."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .errors import shown

FLOAT32 = np.dtype(np.float32)
COMPUTE_DTYPES: tuple[np.dtype, ...] = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))
DEFAULT = "default"
"""A compute dtype that is the device's own 16 bits, known when a program is traced."""
# Values of other dtypes stay what they are: the author of a float64 chose more than 24 bits on
# purpose, the author of a float8 fewer.
FLOAT_DTYPES: frozenset[np.dtype] = frozenset((FLOAT32, *COMPUTE_DTYPES))
"""The dtypes between which values are cast."""
_EIGHT_BITS = re.compile(r"(fp|float|f|int|uint|mxfp|nvfp)[48](_.*)?|mxfp8|nvfp4")
_NOT_16_BITS = "It is the dtype of products of float32 values; float64 values are never cast. "
SHORT_NAMES = {
    "f64": "float64",
    "fp64": "float64",
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
}
"""What jmp, jaxprs and PyTorch users call these dtypes; read wherever a dtype is named."""


def is_default(compute_dtype: Any) -> bool:
    """True for a compute dtype that the device chooses.

    Example:
        >>> is_default("default"), is_default(FLOAT32)
        (True, False)
    """
    return isinstance(compute_dtype, str) and compute_dtype == DEFAULT


def find_dtype(value: Any) -> np.dtype | None:
    """Returns the dtype meant by a dtype, a scalar type or a name, None where none is meant.

    Example:
        >>> find_dtype("bfloat16"), find_dtype("bf16"), find_dtype("bf17")
        (dtype(bfloat16), dtype(bfloat16), None)
    """
    # NumPy takes None for float64, and an array for its own dtype. Here either of them is a
    # mistake: an array in place of a dtype is a forgotten keyword, as in `autocast(fn, x)`.
    if value is None or isinstance(value, jax.Array | np.ndarray | np.generic):
        return None
    # NumPy's error would hold the `repr` of a function, exponential for one that calls two others.
    if callable(value) and not isinstance(value, type):
        return None
    name = SHORT_NAMES.get(value, value) if isinstance(value, str) else value
    try:
        dtype = np.dtype(jnp.dtype(name))
    # A layer of Flax has a `dtype` that is None, of which NumPy makes a ValueError.
    except (TypeError, ValueError):
        return None
    # NumPy makes `object` of any class.
    return None if dtype.hasobject else dtype


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
            f"{argument} must be a dtype, got {shown(value)}. Pass one such as jnp.bfloat16, or "
            "its name, 'bfloat16'."
        )
    return dtype


def as_float_dtype(value: Any, argument: str, allowed: Collection[np.dtype]) -> np.dtype:
    """Returns one of several dtypes.

    Args:
        value: A dtype, a scalar type or a name.
        argument: The argument's name, for the message.
        allowed: The dtypes that it may be.

    Raises:
        ValueError: Another dtype is meant by ``value``, or none.

    Example:
        >>> as_float_dtype("float32", "output_dtype", FLOAT_DTYPES)
        dtype('float32')
    """
    dtype = as_dtype(value, argument)
    if dtype not in allowed:
        raise ValueError(f"{argument} must be {listed(allowed)}, got {dtype.name}.")
    return dtype


def widest_first(dtypes: Collection[np.dtype]) -> list[np.dtype]:
    """Returns dtypes in the order in which messages and files name them.

    Example:
        >>> widest_first(FLOAT_DTYPES)
        [dtype('float32'), dtype('float16'), dtype(bfloat16)]
    """
    return sorted(dtypes, key=lambda dtype: (-dtype.itemsize, len(dtype.name)))


def listed(dtypes: Collection[np.dtype]) -> str:
    """Returns the names of dtypes for a message.

    Example:
        >>> listed(FLOAT_DTYPES)
        'float32, float16 or bfloat16'
    """
    *first, last = (dtype.name for dtype in widest_first(dtypes))
    return f"{', '.join(first)} or {last}"


def as_compute_dtype(value: Any) -> np.dtype | Literal["default"]:
    """Returns the compute dtype meant by ``value``.

    Raises:
        ValueError: It is none of float16, bfloat16 and the word ``"default"``.

    Example:
        >>> as_compute_dtype("float16"), as_compute_dtype("default")
        (dtype('float16'), 'default')
    """
    if is_default(value):
        return DEFAULT
    # What people call 8 bits, whether it is a dtype of NumPy's or not.
    is_narrow = isinstance(value, str) and _EIGHT_BITS.fullmatch(value.lower()) is not None
    dtype = None if is_narrow else as_dtype(value, "compute_dtype")
    if dtype is None or dtype not in COMPUTE_DTYPES:
        is_narrow |= dtype is not None and _EIGHT_BITS.fullmatch(dtype.name) is not None
        eight = (
            "Products run in 8 bits by policy=jmp_autocast.FP8, which is Policy(jnp.bfloat16, "
            "matmul='float8'), and all else in 16. "
        )
        is_wide = dtype in (FLOAT32, np.float64)
        hint = eight if is_narrow else _NOT_16_BITS if is_wide else ""
        raise ValueError(
            "compute_dtype must be float16 or bfloat16, got "
            f"{value if dtype is None else dtype.name}. {hint}To run without casts, pass "
            "enabled=False."
        )
    return dtype
