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
"""The word for the 16-bit dtype that the device prefers, which is chosen at trace time."""
# Values of other dtypes are not cast, because a program declares float64 or float8 on purpose.
FLOAT_DTYPES: frozenset[np.dtype] = frozenset((FLOAT32, *COMPUTE_DTYPES))
"""The dtypes between which values are cast."""
_EIGHT_BITS = re.compile(r"(fp|float|f|int|uint|mxfp|nvfp)[48](_.*)?|mxfp8|nvfp4")
_EIGHT = (
    "Products run in 8 bits by policy=jmp_autocast.FP8, which is Policy(jnp.bfloat16, "
    "matmul='float8'), and all else in 16. "
)
SHORT_NAMES = {
    "f64": "float64",
    "fp64": "float64",
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
}
"""Short names of dtypes, as in jmp and in jaxprs. Every option that takes a dtype takes these."""


def is_default(compute_dtype: Any) -> bool:
    """Returns whether a compute dtype is ``"default"``, which depends on the device."""
    return isinstance(compute_dtype, str) and compute_dtype == DEFAULT


def find_dtype(value: Any) -> np.dtype | None:
    """Returns the dtype that a dtype, scalar type or name stands for; None for any other value.

    Example:
        >>> find_dtype("bfloat16"), find_dtype("bf16"), find_dtype("bf17")
        (dtype(bfloat16), dtype(bfloat16), None)
    """
    # NumPy reads None as float64, and an array as the dtype of the array. Here both are mistakes:
    # an array in place of a dtype means a wrong call, as in `autocast(fn, x)`.
    if value is None or isinstance(value, jax.Array | np.ndarray | np.generic):
        return None
    # A function is refused before NumPy sees it: NumPy's error holds its `repr`, whose size can be
    # exponential for wrappers of wrappers.
    if callable(value) and not isinstance(value, type):
        return None
    name = SHORT_NAMES.get(value, value) if isinstance(value, str) else value
    try:
        dtype = np.dtype(jnp.dtype(name))
    # NumPy raises ValueError for an object whose `dtype` attribute is None, such as a Flax layer.
    except (TypeError, ValueError):
        return None
    # NumPy converts any class to the dtype `object`, which is no answer.
    return None if dtype.hasobject else dtype


def as_dtype(value: Any, argument: str) -> np.dtype:
    """Returns the dtype of a dtype, scalar type or name; raises ValueError for any other value."""
    dtype = find_dtype(value)
    if dtype is None:
        raise ValueError(
            f"{argument} must be a dtype, got {shown(value)}. Pass one such as jnp.bfloat16, or "
            "its name, 'bfloat16'."
        )
    return dtype


def as_float_dtype(value: Any, argument: str, allowed: Collection[np.dtype]) -> np.dtype:
    """Returns the dtype as `as_dtype` does; raises ValueError for a dtype that is not allowed."""
    dtype = as_dtype(value, argument)
    if dtype not in allowed:
        raise ValueError(f"{argument} must be {listed(allowed)}, got {dtype.name}.")
    return dtype


def listed(dtypes: Collection[np.dtype]) -> str:
    """Returns the names of dtypes for a message, the widest first.

    Example:
        >>> listed(FLOAT_DTYPES)
        'float32, float16 or bfloat16'
    """
    ordered = sorted(dtypes, key=lambda dtype: (-dtype.itemsize, len(dtype.name)))
    *first, last = (dtype.name for dtype in ordered)
    return f"{', '.join(first)} or {last}"


def as_compute_dtype(value: Any) -> np.dtype | Literal["default"]:
    """Returns float16, bfloat16 or ``"default"``; raises ValueError for any other value.

    Example:
        >>> as_compute_dtype("float16"), as_compute_dtype("default")
        (dtype('float16'), 'default')
    """
    if is_default(value):
        return DEFAULT
    # Names such as "fp8" get an error of their own, because NumPy may not know them.
    is_narrow = isinstance(value, str) and _EIGHT_BITS.fullmatch(value.lower()) is not None
    dtype = None if is_narrow else as_dtype(value, "compute_dtype")
    if dtype is not None and dtype in COMPUTE_DTYPES:
        return dtype
    name, hint = value if dtype is None else dtype.name, ""
    if is_narrow or _EIGHT_BITS.fullmatch(name):
        hint = _EIGHT
    elif dtype in (FLOAT32, np.float64):
        hint = "It is the dtype of products of float32 values; float64 values are never cast. "
    raise ValueError(
        f"compute_dtype must be float16 or bfloat16, got {name}. {hint}To run without casts, pass "
        "enabled=False."
    )
