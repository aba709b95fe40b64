"""The state of a loss scale, and its growth and backoff after a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .check_arguments import MAX_COUNT, check_configuration, check_scale

_COUNTS = ("good_steps", "consecutive_skips", "skipped_steps", "growth_interval")


class ScaleState(NamedTuple):
    """A loss scale and the numbers that decide how it changes; each field is a scalar array.

    `LossScalingState` describes the fields. The configuration is part of the state, as in the
    ``state_dict`` of PyTorch's ``GradScaler``: a checkpoint holds it, and a program may change it
    without a recompilation.
    """

    scale: jax.Array
    good_steps: jax.Array
    consecutive_skips: jax.Array
    skipped_steps: jax.Array
    growth_factor: jax.Array
    backoff_factor: jax.Array
    growth_interval: jax.Array
    min_scale: jax.Array
    max_scale: jax.Array


def dynamic_scale(init_scale: ArrayLike, **configuration: ArrayLike) -> ScaleState:
    """Returns the first state of an adaptive scale, for arguments of `dynamic_loss_scaling`."""
    return _start(**check_configuration(init_scale=init_scale, **configuration))


def static_scale(scale: ArrayLike) -> ScaleState:
    """Returns the state of a scale that never changes."""
    check_scale(scale)
    # With factors of 1 and equal bounds, `adjusted` always returns the same scale, so that no other
    # code has to know whether a scale is static.
    return _start(
        scale,
        growth_factor=1.0,
        backoff_factor=1.0,
        growth_interval=MAX_COUNT,
        min_scale=scale,
        max_scale=scale,
    )


def adjusted(state: ScaleState, finite: jax.Array) -> ScaleState:
    """Adapts the scale after a step, as PyTorch's ``GradScaler.update`` does.

    After a finite step the count of good steps goes up by one; when it reaches ``growth_interval``,
    the scale grows and the count restarts. After a skipped step the scale backs off and the count
    restarts. There are three differences from PyTorch. The scale stays within ``[min_scale,
    max_scale]``. A scale that is NaN, zero or infinite returns to that range. If
    ``growth_interval`` is lowered below the count, the scale still grows.

    Args:
        state: The scale before the step.
        finite: bool scalar: whether the gradients of the step were finite.
    """
    # The state may hold NumPy arrays or numbers, after a restore or `state._replace(scale=1024)`.
    # In NumPy, an overflow of `scale * growth_factor` would warn, and dtypes would become int64 and
    # float64.
    old = _as_state(jnp.asarray, state._asdict())
    good_steps = optax.safe_increment(old.good_steps)
    # PyTorch compares with ==. With >= the scale also grows if the interval was lowered.
    grow = good_steps >= old.growth_interval
    grown = old.scale * old.growth_factor
    # If the grown scale is infinite, as 3e38 * 2 is in float32, the scale stays, as in PyTorch.
    grown = jnp.minimum(jnp.where(jnp.isfinite(grown), grown, old.scale), old.max_scale)
    # For a scale of NaN, jnp.clip would return NaN. Here the comparison with NaN is False, which
    # selects min_scale.
    backed_off = old.scale * old.backoff_factor
    backed_off = jnp.where(backed_off >= old.min_scale, backed_off, old.min_scale)
    backed_off = jnp.where(backed_off <= old.max_scale, backed_off, old.max_scale)
    return old._replace(
        scale=jnp.where(finite, jnp.where(grow, grown, old.scale), backed_off),
        good_steps=jnp.where(finite & ~grow, good_steps, 0),
        consecutive_skips=jnp.where(finite, 0, optax.safe_increment(old.consecutive_skips)),
        skipped_steps=jnp.where(finite, old.skipped_steps, optax.safe_increment(old.skipped_steps)),
    )


def _start(init_scale: ArrayLike, **configuration: ArrayLike) -> ScaleState:
    """Returns the state before the first step, for checked arguments."""
    counts = dict.fromkeys(("good_steps", "consecutive_skips", "skipped_steps"), 0)
    # jnp.array copies. With jnp.asarray, `static_scale` would put one buffer into three fields, and
    # a step cannot donate one buffer three times.
    return _as_state(jnp.array, {"scale": init_scale, **counts, **configuration})


def _as_state(convert: Callable[..., jax.Array], fields: Mapping[str, Any]) -> ScaleState:
    """Returns a state with each field converted to an array of its dtype, int32 or float32."""
    dtypes = {name: jnp.int32 if name in _COUNTS else jnp.float32 for name in fields}
    return ScaleState(**{name: convert(value, dtypes[name]) for name, value in fields.items()})
