"""Marks on the name stack for regions of a program with their own precision.

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
"""The mark of a region of an inner `autocast`, in which an outer one casts nothing."""


BECAUSE = "because "
"""The start of a mark that names the reason of an equation's plan: its code and cause."""

CAST = "cast"
"""The mark of a cast that this package inserts, to tell it from a cast of the program."""


@with_usage("with full_precision(): inside the function, or @full_precision() above it")
def full_precision() -> contextlib.AbstractContextManager[Any]:
    """Keeps the equations of a region in the dtypes that the program declares.

    It is the counterpart of ``torch.autocast(enabled=False)``. A cast to float32 does not help
    here: in a function that is traced in float32 it adds no equation.

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
    # A named scope, unlike an equation, survives every transformation of JAX and costs nothing
    # outside `autocast`.
    return jax.named_scope(mark(FULL))


@with_usage("with compute_precision(dtype): inside the function")
def compute_precision(dtype: DTypeLike) -> contextlib.AbstractContextManager[Any]:
    """Sets the compute dtype of a region.

    Args:
        dtype: ``float16`` or ``bfloat16``; ``float32`` has the effect of `full_precision`.

    Returns:
        A context manager for use in code that autocast traces. Outside autocast it does nothing.

    Raises:
        ValueError: ``dtype`` is none of the three.

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
    """Returns the name of the scope that marks a region.

    Example:
        >>> mark("float16")
        'autocast[float16]'
    """
    return f"{_PREFIX}{name}]"


def read_mark(scope: str) -> str | None:
    """Returns the name inside a mark; None for a scope that is no mark.

    Example:
        >>> read_mark("autocast[float16]"), read_mark("Dense_0")
        ('float16', None)
    """
    if scope.startswith(_PREFIX) and scope.endswith("]"):
        return scope[len(_PREFIX) : -1]
    return None
