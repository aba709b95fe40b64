"""Regions of a program with a precision of their own, marked on the name stack.

A mark is a ``jax.named_scope``, so it survives jvp, transpose, vmap, scan, jit and remat, and
costs nothing outside autocast.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.typing import DTypeLike

from .policies import FLOAT_DTYPES, listed
from .policies.dtypes import find_dtype

_PREFIX = "autocast["
FULL = "full_precision"
"""The mark of a region in which nothing is lowered."""

GOVERNED = "declared"
"""The mark of a region that an inner autocast has already dealt with."""


BECAUSE = "because "
"""The start of the mark that `explain` has each equation carry: dtype, code and cause."""


def full_precision() -> contextlib.AbstractContextManager[Any]:
    """Nothing in this region is lowered: equations run in the dtypes that the program declares.

    It is the counterpart of ``torch.autocast(enabled=False)``. Use it in place of a cast to
    float32, which adds no equation to a function that is traced in float32.

    Returns:
        A context manager for use in code that autocast traces. Outside autocast it does nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import autocast, full_precision
        >>> @autocast(compute_dtype=jnp.bfloat16, output_dtype="computed")
        ... def f(x):
        ...     with full_precision():
        ...         return x @ x
        >>> f(jnp.ones((2, 2))).dtype
        dtype('float32')
    """
    # A scope and not an equation: it survives every transformation of JAX, and costs nothing where
    # nobody reads it.
    return jax.named_scope(mark(FULL))


def compute_precision(dtype: DTypeLike) -> contextlib.AbstractContextManager[Any]:
    """The compute dtype of this region is ``dtype``.

    Args:
        dtype: ``float16`` or ``bfloat16``, or ``float32`` for `full_precision`; in a float64
            program ``float32``, or ``float64`` for `full_precision`. ``float64`` in a float32
            program is an island, as in `Policy.with_scopes`.

    Returns:
        A context manager for use in code that autocast traces. Outside autocast it does nothing.

    Raises:
        ValueError: ``dtype`` is another dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import autocast, compute_precision
        >>> @autocast(compute_dtype=jnp.float16, output_dtype="computed")
        ... def f(x):
        ...     with compute_precision(jnp.bfloat16):
        ...         return x @ x
        >>> f(jnp.ones((2, 2))).dtype
        dtype(bfloat16)
    """
    found = find_dtype(dtype)
    if found is None or found not in FLOAT_DTYPES:
        name = repr(dtype) if found is None else found.name
        raise ValueError(f"compute_precision takes {listed(FLOAT_DTYPES)}, got {name}.")
    return jax.named_scope(mark(found.name))


def mark(name: str) -> str:
    """Returns the scope name that marks a region.

    Example:
        >>> mark("float16")
        'autocast[float16]'
    """
    return f"{_PREFIX}{name}]"


def read_mark(scope: str) -> str | None:
    """Returns what a scope name marks, None where it is no mark.

    Example:
        >>> read_mark("autocast[float16]"), read_mark("Dense_0")
        ('float16', None)
    """
    if scope.startswith(_PREFIX) and scope.endswith("]"):
        return scope[len(_PREFIX) : -1]
    return None
