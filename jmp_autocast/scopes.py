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
from .policies.errors import shown, with_usage

_PREFIX = "autocast["
FULL = "full_precision"
"""The mark of a region in which nothing is lowered."""

GOVERNED = "declared"
"""The mark of a region that an inner autocast has already dealt with."""


BECAUSE = "because "
"""The start of the mark of an equation in `explain`: dtype, code and cause."""

CAST = "cast"
"""The mark of a cast of this package: back to the declared dtype it changes nothing."""


@with_usage("with full_precision(): inside the function, or @full_precision() above it")
def full_precision() -> contextlib.AbstractContextManager[Any]:
    """Nothing in this region is lowered: equations run in the dtypes that the program declares.

    It is the counterpart of ``torch.autocast(enabled=False)``. Use it in place of a cast to
    float32, which adds no equation to a function that is traced in float32.

    Returns:
        A context manager for use in code that autocast traces. Outside autocast it does nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import autocast, full_precision
        >>> @autocast(policy=jnp.bfloat16, output_dtype="computed")
        ... def f(x):
        ...     with full_precision():
        ...         return x @ x
        >>> f(jnp.ones((8, 8))).dtype
        dtype('float32')
    """
    # A scope and not an equation: it survives every transformation of JAX, and is free outside
    # autocast.
    return jax.named_scope(mark(FULL))


@with_usage("with compute_precision(dtype): inside the function")
def compute_precision(dtype: DTypeLike) -> contextlib.AbstractContextManager[Any]:
    """The compute dtype of this region is ``dtype``.

    Args:
        dtype: ``float16`` or ``bfloat16``, or ``float32`` for `full_precision`.

    Returns:
        A context manager for use in code that autocast traces. Outside autocast it does nothing.

    Raises:
        ValueError: ``dtype`` is another dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import autocast, compute_precision
        >>> @autocast(policy=jnp.float16, output_dtype="computed")
        ... def f(x):
        ...     with compute_precision(jnp.bfloat16):
        ...         return x @ x
        >>> f(jnp.ones((8, 8))).dtype
        dtype(bfloat16)
    """
    found = find_dtype(dtype)
    if found is None or found not in FLOAT_DTYPES:
        name = shown(dtype) if found is None else found.name
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
    """Returns the name in a mark, None for any other scope.

    Example:
        >>> read_mark("autocast[float16]"), read_mark("Dense_0")
        ('float16', None)
    """
    if scope.startswith(_PREFIX) and scope.endswith("]"):
        return scope[len(_PREFIX) : -1]
    return None
