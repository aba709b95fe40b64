"""Errors for wrong arguments of loss scaling."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..policies.errors import shown

# A subnormal scale is refused: XLA:CPU flushes it to zero (1e-40 * 3 is 0.0 in a jitted function),
# and a division by zero makes every gradient infinite or NaN.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)
MAX_COUNT = np.iinfo(np.int32).max


def is_real(dtype: Any) -> bool:
    """Returns whether a dtype is an integer or float dtype, including those of ``ml_dtypes``."""
    return any(jnp.issubdtype(dtype, kind) for kind in (np.integer, np.floating))


def check_scale(value: Any) -> None:
    """Raises an error for a scale that is not a normal, finite float32 number above 0."""
    _check("scale", value, _is_scale, _A_SCALE)


def check_configuration(**arguments: ArrayLike) -> dict[str, ArrayLike]:
    """Checks the arguments of `dynamic_scale`, and returns them.

    The values of JAX arrays are not checked, because ``optax.inject_hyperparams`` passes tracers.
    """
    low = _as_stored("min_scale", arguments["min_scale"]) or SMALLEST_SCALE
    high = _as_stored("max_scale", arguments["max_scale"]) or LARGEST_SCALE
    within = f"within [min_scale, max_scale] = [{low:g}, {high:g}]"
    above = f"finite and at least min_scale={low:g}"

    def check(name: str, holds: Callable[[float], bool], allowed: str) -> None:
        _check(name, arguments[name], holds, allowed)

    check("growth_factor", lambda x: 1 < x <= LARGEST_SCALE, "a finite number above 1")
    check("backoff_factor", lambda x: 0 < x < 1, "a number between 0 and 1")
    check("growth_interval", _is_count, "an integer of at least 1")
    check("min_scale", _is_scale, _A_SCALE)
    check("max_scale", lambda x: low <= x <= LARGEST_SCALE, above)
    # init_scale is checked last. Otherwise min_scale=inf would be reported as a wrong init_scale.
    check("init_scale", lambda x: low <= x <= high, within)
    return arguments


_A_SCALE = "a finite float32 number above 0"


def _is_scale(number: float) -> bool:
    return SMALLEST_SCALE <= number <= LARGEST_SCALE


def _is_count(number: float) -> bool:
    return number.is_integer() and 1 <= number <= MAX_COUNT


def _as_stored(name: str, value: Any) -> float | None:
    """Returns a number as the state stores it; None for a JAX array, which may be a tracer."""
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape or not is_real(value.dtype):
            raise TypeError(
                f"{name} must be a real number, got an array of shape {value.shape} and dtype "
                f"{value.dtype}."
            )
        if isinstance(value, jax.Array):
            return None
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}.")
    # The rounded number is checked: 1e39 is finite in Python and infinite in the state.
    with np.errstate(over="ignore"):
        return float(value) if name == "growth_interval" else float(np.float32(value))


def _check(name: str, value: Any, holds: Callable[[float], bool], allowed: str) -> None:
    number = _as_stored(name, value)
    if number is not None and not holds(number):
        raise ValueError(f"{name}={value!r} is out of range: it must be {allowed}.")
