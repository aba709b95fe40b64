"""The settings that a trace depends on; JAX has no public name for them together."""

from __future__ import annotations

from collections.abc import Hashable

import jax
import numpy as np

from .private_names import private


def trace_context() -> Hashable:
    """Returns the settings and axis names that a trace depends on, as `jax.jit` compares them.

    Without JAX's own answer it equals nothing: what is made under it is made anew.
    """
    context = private("jax._src.config.trace_context")
    return object() if context is None else context()


ENABLE_FLOAT64 = 'Call jax.config.update("jax_enable_x64", True) before the first array is made'


def has_float64() -> bool:
    """Returns whether JAX makes float64 arrays now."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64
