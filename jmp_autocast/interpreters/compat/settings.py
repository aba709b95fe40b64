"""The settings that a trace depends on; JAX has no public name for them together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src import config


def trace_context() -> Any:
    """Returns the settings and axis names that a trace depends on, as `jax.jit` compares them."""
    return config.trace_context()


ENABLE_FLOAT64 = 'Call jax.config.update("jax_enable_x64", True) before the first array is made'


def has_float64() -> bool:
    """Returns whether JAX makes float64 arrays now."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64
