"""The loss scale: its first value, its growth and its backoff."""

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
    """A loss scale and the numbers that decide how it changes, each field a scalar array.

    `LossScalingState` describes the fields. The configuration is part of the state, as in the
    ``state_dict`` of PyTorch's ``GradScaler``: a checkpoint brings it along, and a program may
    change it without a recompilation.
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
    """Returns a scale that adapts, by the numbers among the arguments of `dynamic_loss_scaling`."""
    return _start(**check_configuration(init_scale=init_scale, **configuration))


def static_scale(scale: ArrayLike) -> ScaleState:
    """Returns a scale that never changes."""
    check_scale(scale)
    # With factors of 1 and equal bounds `adjusted` returns the same scale in any case, so that no
    # other code depends on whether a scale is static.
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

    After a finite step the count of good steps goes up by one; when it reaches
    ``growth_interval``, the scale grows and the count restarts. After a skipped step the scale
    backs off and the count restarts. Unlike in PyTorch, the scale stays within
    ``[min_scale, max_scale]``; a ``growth_interval`` that was lowered below the count still makes
    the scale grow; a scale that is NaN, zero or infinite returns into that range.

    Args:
        state: The scale before the step.
        finite: bool scalar: whether the gradients of the step were finite.
    """
    # A user may write `state._replace(scale=1024)`, and a restored checkpoint may hold NumPy
    # arrays. NumPy would warn if `scale * growth_factor` overflows, and promote to int64 and
    # float64.
    old = _as_state(jnp.asarray, state._asdict())
    good_steps = optax.safe_increment(old.good_steps)
    # PyTorch compares with ==; with >= a lowered interval is reached too.
    grow = good_steps >= old.growth_interval
    grown = old.scale * old.growth_factor
    # 3e38 * 2 is infinite in float32, and PyTorch keeps the scale there as well.
    grown = jnp.minimum(jnp.where(jnp.isfinite(grown), grown, old.scale), old.max_scale)
    # jnp.clip would return NaN for a scale of NaN. Each comparison with NaN is False, so that
    # this order of the operands gives min_scale.
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
    """Returns the state before the first step; the arguments are not checked."""
    counts = dict.fromkeys(("good_steps", "consecutive_skips", "skipped_steps"), 0)
    # jnp.array copies. With jnp.asarray, `static_scale` would put one buffer into three fields, and
    # a step that donates its state would donate that buffer three times, which is an error.
    return _as_state(jnp.array, {"scale": init_scale, **counts, **configuration})


def _as_state(convert: Callable[..., jax.Array], fields: Mapping[str, Any]) -> ScaleState:
    """Returns a state of its fields, each converted to an array of the field's dtype."""
    dtypes = {name: jnp.int32 if name in _COUNTS else jnp.float32 for name in fields}
    return ScaleState(**{name: convert(value, dtypes[name]) for name, value in fields.items()})
