"""Checks the arguments of loss scaling, and raises errors that say what to write instead."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# A subnormal scale is refused: XLA:CPU takes it for zero (1e-40 * 3 is 0.0 in a jitted function),
# and a division by it makes every gradient infinite or NaN.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)
MAX_COUNT = np.iinfo(np.int32).max


def as_bool_scalar(finite: Any) -> jax.Array:
    """Returns ``finite`` as a bool scalar array; raises an error where it is something else."""
    if not isinstance(finite, jax.Array | np.ndarray | np.generic | bool | numbers.Number):
        raise TypeError(f"finite must be a bool array of shape (), got {finite!r}.")
    finite = jnp.asarray(finite)
    if finite.shape or finite.dtype != bool:
        raise ValueError(
            f"finite must be a bool array of shape (), got shape {finite.shape} and dtype "
            f"{finite.dtype}. With several, pass jnp.all of them."
        )
    return finite


def check_scale(value: Any) -> None:
    """Raises an error for a number that is not a normal, finite float32 number above 0."""
    number = _as_stored("scale", value)
    if number is not None:
        usable = SMALLEST_SCALE <= number <= LARGEST_SCALE
        _check("scale", value, usable, "a finite float32 number above 0")


def check_configuration(**arguments: ArrayLike) -> dict[str, ArrayLike]:
    """Checks the numbers among the arguments of `LossScale.dynamic`, and returns all arguments.

    A JAX array passes, whatever its value: ``optax.inject_hyperparams`` hands over traced ones.
    """
    stored = {name: _as_stored(name, value) for name, value in arguments.items()}
    known = {name: value for name, value in stored.items() if value is not None}
    low = known.get("min_scale", SMALLEST_SCALE)
    high = known.get("max_scale", LARGEST_SCALE)

    def check(name: str, holds: bool, allowed: str) -> None:
        _check(name, arguments[name], holds, allowed)

    # init_scale is checked last. Otherwise min_scale=inf would be reported as an init_scale that
    # is out of range.
    for name, value in sorted(known.items(), key=lambda item: item[0] == "init_scale"):
        match name:
            case "growth_factor":
                check(name, 1 < value <= LARGEST_SCALE, "a finite number above 1")
            case "backoff_factor":
                check(name, 0 < value < 1, "a number between 0 and 1")
            case "growth_interval":
                integral = math.isfinite(value) and value == math.floor(value)
                check(name, integral and 1 <= value <= MAX_COUNT, "an integer of at least 1")
            case "min_scale":
                usable = SMALLEST_SCALE <= value <= LARGEST_SCALE
                check(name, usable, "a finite float32 number above 0")
            case "max_scale":
                usable = low <= value <= LARGEST_SCALE
                check(name, usable, f"finite and at least min_scale={low:g}")
            case "init_scale":
                allowed = f"within [min_scale, max_scale] = [{low:g}, {high:g}]"
                check(name, low <= value <= high, allowed)
    return arguments


def _as_stored(name: str, value: Any) -> float | None:
    """Returns a number as the state will hold it; None for a JAX array, which may be traced."""
    if isinstance(value, jax.Array | np.ndarray):
        kinds = (np.integer, np.floating)
        if value.shape or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            raise TypeError(
                f"{name} must be a real number, got an array of shape {value.shape} and dtype "
                f"{value.dtype}."
            )
        if isinstance(value, jax.Array):
            return None
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    # Bounds hold for the float32 number: 1e39 is finite in Python and infinite in the state.
    with np.errstate(over="ignore"):
        return float(value) if name == "growth_interval" else float(np.float32(value))


def _check(name: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r} is out of range: it must be {allowed}.")
