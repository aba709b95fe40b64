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
# Values of other dtypes are not cast: the author of a float64 chose more than 24 bits on purpose,
# the author of a float8 fewer.
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
"""Short names of dtypes in jmp, in jaxprs and among PyTorch users; allowed for every dtype."""


def is_default(compute_dtype: Any) -> bool:
    """True for a compute dtype that the device chooses."""
    return isinstance(compute_dtype, str) and compute_dtype == DEFAULT


def find_dtype(value: Any) -> np.dtype | None:
    """Returns the dtype of a dtype, a scalar type or a name, None for anything else.

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
    # A layer of Flax has a `dtype` that is None, for which NumPy raises ValueError.
    except (TypeError, ValueError):
        return None
    # NumPy makes `object` of any class.
    return None if dtype.hasobject else dtype


def as_dtype(value: Any, argument: str) -> np.dtype:
    """Returns the dtype of a dtype, a scalar type or a name; anything else is a ValueError."""
    dtype = find_dtype(value)
    if dtype is None:
        raise ValueError(
            f"{argument} must be a dtype, got {shown(value)}. Pass one such as jnp.bfloat16, or "
            "its name, 'bfloat16'."
        )
    return dtype


def as_float_dtype(value: Any, argument: str, allowed: Collection[np.dtype]) -> np.dtype:
    """Returns one of the allowed dtypes, as `as_dtype`; any other is a ValueError."""
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
    """Returns a compute dtype: float16, bfloat16 or ``"default"``; any other is a ValueError.

    Example:
        >>> as_compute_dtype("float16"), as_compute_dtype("default")
        (dtype('float16'), 'default')
    """
    if is_default(value):
        return DEFAULT
    # A name of 8 bits need not be a dtype of NumPy's.
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
