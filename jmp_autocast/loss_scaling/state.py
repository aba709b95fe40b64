"""The loss scale: how it grows and backs off, and how gradients are unscaled with it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
_MAX_COUNT = np.iinfo(np.int32).max

AxisName = Hashable | tuple[Hashable, ...] | None


class LossScaleState(NamedTuple):
    """A loss scale and all that decides how it moves; every field is an array of shape ``[]``.

    The configuration is part of the state, as in the ``state_dict`` of PyTorch's ``GradScaler``: a
    checkpoint brings it along, and ``state._replace(growth_interval=jnp.int32(500))`` changes it
    without a recompilation.

    Attributes:
      scale: float32, what the loss is multiplied with.
      good_steps: int32, consecutive finite steps since the scale last moved.
      consecutive_skips: int32, steps skipped in a row up to now; 0 after a finite step.
      skipped_steps: int32, steps skipped since the start.
      growth_factor: float32, what the scale is multiplied with when it grows.
      backoff_factor: float32, what the scale is multiplied with on a skipped step.
      growth_interval: int32, consecutive finite steps after which the scale grows.
      min_scale: float32, the scale never backs off below it.
      max_scale: float32, the scale never grows above it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_autocast import dynamic_loss_scale
      >>> state = dynamic_loss_scale(1024.0)
      >>> grads, finite = state.unscale({"w": jnp.array([2048.0, 512.0])})
      >>> print(grads["w"], finite)
      [2.  0.5] True
      >>> print(state.adjust(finite=False).scale)
      512.0
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

    def unscale(self, grads: Any, axis_name: AxisName = None) -> tuple[Any, jax.Array]:
        """Divides gradients by the scale, and says whether all of them are finite.

        The division is done in float32 (float64 leaves in float64), and the check looks at its
        results: a finite scaled gradient that overflows in the division is seen.

        Args:
          grads: A pytree of arrays. Floating and complex leaves of any width are unscaled; leaves
            of other dtypes (integer, bool, float0) pass through.
          axis_name: Mapped axis or axes (``shard_map``, ``pmap``, ``vmap``) over which the answer
            has to be the same: one bad shard makes it False on all.

        Returns:
          The gradients, 16-bit and 8-bit leaves as float32, and a bool array of shape ``[]``. It is
          False too where the scale itself is unusable: NaN, infinite, zero or subnormal.

        Example:
          >>> import jax.numpy as jnp
          >>> from jmp_autocast import static_loss_scale
          >>> grads, finite = static_loss_scale(8.0).unscale(jnp.array([16.0, jnp.inf]))
          >>> print(grads, finite)
          [ 2. inf] False
        """
        scale = _arrays(self).scale
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads) if _is_inexact(leaf)]
        # The saving was measured on CPUs; elsewhere no conditional is added without a measurement.
        finite = lax.platform_dependent(scale, *leaves, cpu=_finite_by_sums, default=_finite)
        grads = jax.tree.map(lambda leaf: _unscaled(leaf, scale), grads)
        if axis_name is not None:
            finite = lax.pmin(finite.astype(jnp.int32), axis_name) > 0
        return grads, finite

    def adjust(self, finite: ArrayLike) -> LossScaleState:
        """Moves the scale after a step, as PyTorch's ``GradScaler.update`` does.

        After a finite step the count of good steps goes up by one, and on the
        ``growth_interval``-th the scale grows and the count restarts. After any other step the
        scale backs off and the count restarts.

        Where it differs from PyTorch: the scale stays within ``[min_scale, max_scale]``; a
        ``growth_interval`` that was lowered below the count still makes it grow; a scale that is
        NaN, zero or infinite comes back into that range.

        Args:
          finite: bool of shape ``[]``: whether the gradients of the step were finite.

        Returns:
          The state for the next step.

        Raises:
          TypeError: ``finite`` is no array.
          ValueError: ``finite`` has another shape or dtype.

        Example:
          >>> from jmp_autocast import dynamic_loss_scale
          >>> state = dynamic_loss_scale(1024.0).adjust(finite=False)
          >>> print(state.scale, state.skipped_steps)
          512.0 1
        """
        finite = as_flag(finite)
        old = _arrays(self)
        good_steps = _increment(old.good_steps)
        grow = good_steps >= old.growth_interval
        grown = old.scale * old.growth_factor
        # PyTorch keeps the scale where growth would make it infinite.
        grown = jnp.minimum(jnp.where(jnp.isfinite(grown), grown, old.scale), old.max_scale)
        # maximum and minimum would hand a NaN on; this order of comparisons does not.
        backed_off = old.scale * old.backoff_factor
        backed_off = jnp.where(backed_off >= old.min_scale, backed_off, old.min_scale)
        backed_off = jnp.where(backed_off <= old.max_scale, backed_off, old.max_scale)
        return old._replace(
            scale=jnp.where(finite, jnp.where(grow, grown, old.scale), backed_off),
            good_steps=jnp.where(finite & ~grow, good_steps, 0),
            consecutive_skips=jnp.where(finite, 0, _increment(old.consecutive_skips)),
            skipped_steps=jnp.where(finite, old.skipped_steps, _increment(old.skipped_steps)),
        )


def dynamic_loss_scale(
    init_scale: ArrayLike = 2.0**16,
    *,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
    min_scale: ArrayLike = 1.0,
    max_scale: ArrayLike = 2.0**24,
) -> LossScaleState:
    """Makes a loss scale that adapts, for training loops that hold it themselves.

    With an optax optimizer, :func:`dynamic_loss_scaling` holds it in the optimizer's state.

    The defaults are those of PyTorch's ``GradScaler``. The bounds are ours: PyTorch's scale can
    sink to 0, after which every parameter becomes NaN.

    Args:
      init_scale: The first scale, within ``[min_scale, max_scale]``.
      growth_factor: What the scale is multiplied with when it grows; above 1.
      backoff_factor: What it is multiplied with on a skipped step; between 0 and 1.
      growth_interval: Consecutive finite steps after which it grows; an integer of at least 1.
      min_scale: Lower bound; a normal float32 number above 0.
      max_scale: Upper bound; a finite float32 number.

    Returns:
      The state.

    Raises:
      TypeError: An argument is not a number.
      ValueError: An argument is out of range. Arrays are not checked, as their values may not be
        known before the program runs.

    Example:
      >>> from jmp_autocast import dynamic_loss_scale
      >>> state = dynamic_loss_scale(growth_interval=2)
      >>> for finite in (True, True, False):
      ...     state = state.adjust(finite)
      >>> print(state.scale, state.skipped_steps)
      65536.0 1
    """
    checked = check_configuration(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    return initial_state(**checked)


def static_loss_scale(scale: ArrayLike) -> LossScaleState:
    """Makes a loss scale that never moves, with the methods of one that does.

    Args:
      scale: The scale; a normal, finite float32 number above 0.

    Returns:
      The state.

    Raises:
      TypeError: The scale is not a number.
      ValueError: The scale is out of range.

    Example:
      >>> from jmp_autocast import static_loss_scale
      >>> print(static_loss_scale(128.0).adjust(finite=False).scale)
      128.0
    """
    check_scale(scale)
    return initial_state(
        init_scale=scale,
        growth_factor=1.0,
        backoff_factor=1.0,
        growth_interval=_MAX_COUNT,
        min_scale=scale,
        max_scale=scale,
    )


def initial_state(
    *,
    init_scale: ArrayLike,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: ArrayLike,
    min_scale: ArrayLike,
    max_scale: ArrayLike,
) -> LossScaleState:
    """Makes the state before the first step; its arguments are taken as they are.

    It copies them, so that no two fields share a buffer that the user may donate.
    """
    return LossScaleState(
        scale=jnp.array(init_scale, jnp.float32),
        good_steps=jnp.zeros([], jnp.int32),
        consecutive_skips=jnp.zeros([], jnp.int32),
        skipped_steps=jnp.zeros([], jnp.int32),
        growth_factor=jnp.array(growth_factor, jnp.float32),
        backoff_factor=jnp.array(backoff_factor, jnp.float32),
        growth_interval=jnp.array(growth_interval, jnp.int32),
        min_scale=jnp.array(min_scale, jnp.float32),
        max_scale=jnp.array(max_scale, jnp.float32),
    )


def as_flag(finite: Any) -> jax.Array:
    """Returns ``finite`` as a bool array of shape ``[]``, which it has to be."""
    if not isinstance(finite, jax.Array | np.ndarray | np.generic | bool | numbers.Number):
        raise TypeError(f"finite has to be a bool array of shape [], got {finite!r}.")
    finite = jnp.asarray(finite)
    if finite.shape or finite.dtype != bool:
        raise ValueError(
            f"finite has to be a bool array of shape [], got shape {finite.shape} and dtype "
            f"{finite.dtype}. With several, pass jnp.all of them."
        )
    return finite


def check_scale(value: Any) -> None:
    """Checks a scale that is a number: a normal, finite float32 number above 0."""
    number = _number("scale", value)
    if number is not None:
        _check("scale", value, _TINY <= number <= _HUGE, "a finite float32 number above 0")


def check_configuration(**arguments: ArrayLike) -> dict[str, ArrayLike]:
    """Checks the numbers among the arguments of a dynamic scale, and returns all arguments.

    Arrays pass, whatever their values: ``optax.inject_hyperparams`` hands them over, traced.
    """
    values = {name: _number(name, value) for name, value in arguments.items()}
    known = {name: value for name, value in values.items() if value is not None}

    def check(name: str, holds: bool, allowed: str) -> None:
        _check(name, arguments[name], holds, allowed)

    low, high = known.get("min_scale", _TINY), known.get("max_scale", _HUGE)
    # The first scale last, so that no bad bound is blamed on it.
    for name, value in sorted(known.items(), key=lambda item: item[0] == "init_scale"):
        match name:
            case "growth_factor":
                check(name, 1 < value <= _HUGE, "a finite number above 1")
            case "backoff_factor":
                check(name, 0 < value < 1, "a number between 0 and 1")
            case "growth_interval":
                integral = math.isfinite(value) and value == math.floor(value)
                check(name, integral and 1 <= value <= _MAX_COUNT, "an integer of at least 1")
            case "min_scale":
                check(name, _TINY <= value <= _HUGE, "a finite float32 number above 0")
            case "max_scale":
                check(name, low <= value <= _HUGE, f"finite and at least min_scale={low:g}")
            case "init_scale":
                allowed = f"within [min_scale, max_scale] = [{low:g}, {high:g}]"
                check(name, low <= value <= high, allowed)
    return arguments


def _number(name: str, value: Any) -> float | None:
    """The number as the state will hold it; None for a JAX array, which may be traced."""
    if isinstance(value, jax.Array | np.ndarray):
        kinds = (np.integer, np.floating)
        if value.shape or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            raise TypeError(
                f"{name} has to be a real number, got an array of shape {value.shape} and dtype "
                f"{value.dtype}."
            )
        if isinstance(value, jax.Array):
            return None
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} has to be a number, got {value!r}.")
    with np.errstate(over="ignore"):
        return float(value) if name == "growth_interval" else float(np.float32(value))


def _check(name: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r} is out of range: it has to be {allowed}.")


def _arrays(state: LossScaleState) -> LossScaleState:
    """A restored state may hold NumPy arrays, whose overflow warns, and an edited one numbers."""
    counts = ("good_steps", "consecutive_skips", "skipped_steps", "growth_interval")
    return LossScaleState(
        **{
            name: jnp.asarray(value, jnp.int32 if name in counts else jnp.float32)
            for name, value in state._asdict().items()
        }
    )


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact)


def _unscaled(leaf: Any, scale: jax.Array) -> Any:
    if not _is_inexact(leaf):
        return leaf
    wide = _widened(jnp.asarray(leaf))
    return wide / scale.astype(wide.dtype)


def _widened(leaf: jax.Array) -> jax.Array:
    # Not promote_types: float8 types do not promote.
    return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.float32)


def _finite(scale: jax.Array, *leaves: jax.Array) -> jax.Array:
    """Whether the scale is usable and all unscaled leaves are finite."""
    finite = (scale >= _TINY) & (scale <= _HUGE)
    for leaf in leaves:
        # Times zero, a finite number is 0 and any other is NaN.
        finite &= jnp.sum(_unscaled(leaf, scale) * 0) == 0
    return finite


def _finite_by_sums(scale: jax.Array, *leaves: jax.Array) -> jax.Array:
    """The same, faster where XLA stores the results of elementwise operations before it sums them.

    A finite sum has finite terms only, and a scale of at least 1 keeps them finite. Where a sum is
    not finite it may have overflowed, so that the terms decide.
    """
    finite = (scale >= 1) & (scale <= _HUGE)
    for leaf in leaves:
        finite &= jnp.isfinite(jnp.sum(_widened(leaf)))
    return lax.cond(
        finite, lambda *_: finite, lambda *leaves: finite | _finite(*leaves), scale, *leaves
    )


def _increment(count: jax.Array) -> jax.Array:
    return jnp.where(count < _MAX_COUNT, count + 1, count)
