"""The compute dtype of kernels with the decorator `in_compute_dtype`, during a trace."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.extend import source_info_util

KERNEL_DTYPE: Any = jax.make_user_context(None)
"""The compute dtype of the kernels that are traced now; None if kernels keep their dtypes.

A user context is part of the key of JAX's caches, so a change of it traces functions again.
"""


def kernels_in(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which kernels with `in_compute_dtype` run in a dtype.

    With None they keep their own dtypes.
    """
    now = KERNEL_DTYPE.value
    is_same = dtype is None if now is None else dtype is not None and now == dtype
    return contextlib.nullcontext() if is_same else KERNEL_DTYPE(dtype)


def current_scopes() -> tuple[str, ...]:
    """Returns the ``jax.named_scope`` names at the current point of the innermost trace."""
    stack = source_info_util.current_name_stack().stack
    return tuple([s.name for s in stack if type(s).__name__ == "Scope"])
