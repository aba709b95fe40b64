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
FLOAT64 = np.dtype(np.float64)
# What a program declares, and what of it runs in each compute dtype's place, is one step wider.
_WIDE = {
    np.dtype(jnp.float16): FLOAT32,
    np.dtype(jnp.bfloat16): FLOAT32,
    FLOAT32: FLOAT64,
}
COMPUTE_DTYPES: tuple[np.dtype, ...] = tuple(_WIDE)
DEFAULT = "default"
"""A compute dtype that is the device's own 16 bits, known when a program is traced."""
_NARROW = {wide: tuple(d for d in _WIDE if _WIDE[d] == wide) for wide in (FLOAT32, FLOAT64)}
# The dtypes between which values are cast. Others stay what they are: a float64 in a float32
# program has an author who chose more than 24 bits on purpose, a float8 one who chose fewer.
_DOMAINS = {wide: frozenset((wide, *narrow)) for wide, narrow in _NARROW.items()}
FLOAT_DTYPES: frozenset[np.dtype] = frozenset.union(*_DOMAINS.values())
_EIGHT_BITS = re.compile(r"(fp|float|f|int|uint|mxfp|nvfp)[48](_.*)?|mxfp8|nvfp4")
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


def wide_dtype(compute_dtype: Any) -> np.dtype:
    """Returns the dtype beside a compute dtype: of sums, solves and all that is not lowered.

    Args:
        compute_dtype: float16, bfloat16, float32, or the word for one of the first two.

    Example:
        >>> wide_dtype("bfloat16"), wide_dtype("float32")
        (dtype('float32'), dtype('float64'))
    """
    return FLOAT32 if is_default(compute_dtype) else _WIDE[np.dtype(compute_dtype)]


def is_default(compute_dtype: Any) -> bool:
    """True for a compute dtype that the device chooses.

    Example:
        >>> is_default("default"), is_default(FLOAT32)
        (True, False)
    """
    return isinstance(compute_dtype, str) and compute_dtype == DEFAULT


def narrow_dtypes(wide: np.dtype) -> tuple[np.dtype, ...]:
    """Returns the compute dtypes of a wide dtype.

    Example:
        >>> narrow_dtypes(FLOAT64)
        (dtype('float32'),)
    """
    return _NARROW[wide]


def domain(wide: np.dtype) -> frozenset[np.dtype]:
    """Returns the dtypes between which values are cast where a wide dtype is in force.

    Example:
        >>> sorted(dtype.name for dtype in domain(FLOAT64))
        ['float32', 'float64']
    """
    return _DOMAINS[wide]


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
        >>> as_float_dtype("float32", "output_dtype", domain(FLOAT64))
        dtype('float32')
    """
    dtype = as_dtype(value, argument)
    if dtype not in allowed:
        raise ValueError(f"{argument} must be {listed(allowed)}, got {dtype.name}.")
    return dtype


def widest_first(dtypes: Collection[np.dtype]) -> list[np.dtype]:
    """Returns dtypes in the order in which messages and files name them.

    Example:
        >>> widest_first(domain(FLOAT32))
        [dtype('float32'), dtype('float16'), dtype(bfloat16)]
    """
    return sorted(dtypes, key=lambda dtype: (-dtype.itemsize, len(dtype.name)))


def listed(dtypes: Collection[np.dtype]) -> str:
    """Returns the names of dtypes for a message.

    Example:
        >>> listed(domain(FLOAT32))
        'float32, float16 or bfloat16'
    """
    *first, last = (dtype.name for dtype in widest_first(dtypes))
    return f"{', '.join(first)} or {last}"


def as_compute_dtype(value: Any) -> np.dtype | Literal["default"]:
    """Returns the compute dtype meant by ``value``.

    Raises:
        ValueError: It is none of float16, bfloat16, float32 and the word ``"default"``.

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
        raise ValueError(
            "compute_dtype must be float16 or bfloat16, or float32 for a float64 program, got "
            f"{value if dtype is None else dtype.name}. {eight if is_narrow else ''}To run without "
            "casts, pass enabled=False."
        )
    return dtype
