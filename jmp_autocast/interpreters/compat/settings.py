"""The settings that a trace depends on; JAX has no public name for them together."""

from __future__ import annotations

from typing import Any

from jax._src import config


def trace_context() -> Any:
    """Returns the settings and axis names that a trace depends on, as `jax.jit` compares them."""
    return config.trace_context()
