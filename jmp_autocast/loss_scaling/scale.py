"""The loss scale: how it grows and backs off, and how gradients are unscaled with it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..policies.errors import with_usage
from .check_arguments import MAX_COUNT, as_bool_scalar, check_configuration, check_scale
from .unscale import AxisName, unscale_and_check

_COUNTS = ("good_steps", "consecutive_skips", "skipped_steps", "growth_interval")


class LossScale(NamedTuple):
    """A loss scale and everything that decides how it changes.

    `LossScale.dynamic` makes a scale that adapts, `LossScale.static` one that never changes. A
    training loop that holds the scale itself carries a `LossScale`; with an optax optimizer,
    `dynamic_loss_scaling` holds it in the optimizer's state.

    Every field is a scalar array. The configuration is part of the state, as in the ``state_dict``
    of PyTorch's ``GradScaler``: a checkpoint brings it along, and
    ``scale._replace(growth_interval=jnp.int32(500))`` changes it without a recompilation.

    Attributes:
        scale: float32; the loss is multiplied by it.
        good_steps: int32; consecutive finite steps since the scale last moved.
        consecutive_skips: int32; steps skipped in a row up to now, 0 after a finite step.
        skipped_steps: int32; steps skipped since the start.
        growth_factor: float32; the scale is multiplied by it when it grows.
        backoff_factor: float32; the scale is multiplied by it on a skipped step.
        growth_interval: int32; consecutive finite steps after which the scale grows.
        min_scale: float32; the scale never backs off below it.
        max_scale: float32; the scale never grows above it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import LossScale
        >>> scale = LossScale.dynamic(1024.0)
        >>> grads, finite = scale.unscale({"w": jnp.array([2048.0, 512.0])})
        >>> print(grads["w"], finite)
        [2.  0.5] True
        >>> print(scale.adjust(finite=False).scale)
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

    @staticmethod
    def dynamic(
        init_scale: ArrayLike = 2.0**16,
        *,
        growth_factor: ArrayLike = 2.0,
        backoff_factor: ArrayLike = 0.5,
        growth_interval: ArrayLike = 2000,
        min_scale: ArrayLike = 1.0,
        max_scale: ArrayLike = 2.0**24,
    ) -> LossScale:
        """Makes a loss scale that adapts.

        The defaults are those of PyTorch's ``GradScaler``. PyTorch has no bounds: its scale can
        sink to 0, after which every parameter becomes NaN.

        Args:
            init_scale: The first scale, within ``[min_scale, max_scale]``.
            growth_factor: The scale is multiplied by it when it grows; above 1.
            backoff_factor: The scale is multiplied by it on a skipped step; between 0 and 1.
            growth_interval: Consecutive finite steps after which the scale grows; an integer of at
                least 1.
            min_scale: Lower bound; a normal float32 number above 0.
            max_scale: Upper bound; a finite float32 number.

        Returns:
            The scale before the first step.

        Raises:
            TypeError: An argument is not a number.
            ValueError: An argument is out of range. JAX arrays are not checked: their values may
                be unknown before the program runs.

        Example:
            >>> from jmp_autocast import LossScale
            >>> scale = LossScale.dynamic(growth_interval=2)
            >>> for finite in (True, True, False):
            ...     scale = scale.adjust(finite)
            >>> print(scale.scale, scale.skipped_steps)
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
        return _before_the_first_step(**checked)

    @staticmethod
    def static(scale: ArrayLike) -> LossScale:
        """Makes a loss scale that never changes, with the methods of one that does.

        Args:
            scale: The scale; a normal, finite float32 number above 0.

        Returns:
            The scale before the first step.

        Raises:
            TypeError: ``scale`` is not a number.
            ValueError: ``scale`` is out of range.

        Example:
            >>> from jmp_autocast import LossScale
            >>> print(LossScale.static(128.0).adjust(finite=False).scale)
            128.0
        """
        check_scale(scale)
        # With factors of 1 and equal bounds `adjust` gives the same scale whatever happens, so
        # that no other code has to ask whether a scale is static.
        return _before_the_first_step(
            scale,
            growth_factor=1.0,
            backoff_factor=1.0,
            growth_interval=MAX_COUNT,
            min_scale=scale,
            max_scale=scale,
        )

    def unscale(self, grads: Any, axis_name: AxisName = None) -> tuple[Any, jax.Array]:
        """Divides gradients by the scale, and says whether all of them are finite.

        The division is done in float32 (float64 leaves in float64), and the check looks at its
        results: it finds a finite scaled gradient that overflows in the division.

        Args:
            grads: A pytree of arrays. Floating and complex leaves of any width are unscaled;
                leaves of other dtypes (integer, bool, float0) pass through.
            axis_name: Mapped axis or axes (``shard_map``, ``pmap``, ``vmap``) over which the answer
                must be the same: one bad shard makes it False on all.

        Returns:
            The gradients, 16-bit and 8-bit leaves as float32, and a bool scalar. It is also False
            if the scale itself is unusable: NaN, infinite, zero or subnormal.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import LossScale
            >>> grads, finite = LossScale.static(8.0).unscale(jnp.array([16.0, jnp.inf]))
            >>> print(grads, finite)
            [ 2. inf] False
        """
        return unscale_and_check(_with_array_fields(self).scale, grads, axis_name)

    def adjust(self, finite: ArrayLike, *others: ArrayLike) -> LossScale:
        """Adapts the scale after a step, as PyTorch's ``GradScaler.update`` does.

        After a finite step the count of good steps goes up by one; when it reaches
        ``growth_interval``, the scale grows and the count restarts. After a skipped step the scale
        backs off and the count restarts.

        Where it differs from PyTorch: the scale stays within ``[min_scale, max_scale]``; a
        ``growth_interval`` that was lowered below the count still makes the scale grow; a scale
        that is NaN, zero or infinite comes back into that range.

        Several losses and optimizers may share a scale: call this method once in an iteration, with
        the results of all of them, as PyTorch's ``update`` is called once. Each optimizer makes its
        own step, or skips it; one bad result makes the scale back off.

        Args:
            finite: bool scalar: whether the gradients of the step were finite.
            *others: Those of the other losses of the iteration.

        Returns:
            The scale for the next step.

        Raises:
            TypeError: ``finite`` is not an array.
            ValueError: ``finite`` has another shape or dtype.

        Example:
            >>> from jmp_autocast import LossScale
            >>> scale = LossScale.dynamic(1024.0).adjust(finite=False)
            >>> print(scale.scale, scale.skipped_steps)
            512.0 1
        """
        finite = functools.reduce(operator.and_, map(as_bool_scalar, (finite, *others)))
        old = _with_array_fields(self)
        good_steps = _increment(old.good_steps)
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
            consecutive_skips=jnp.where(finite, 0, _increment(old.consecutive_skips)),
            skipped_steps=jnp.where(finite, old.skipped_steps, _increment(old.skipped_steps)),
        )


# A NamedTuple may not define it in its body.
LossScale.__new__ = with_usage("LossScale.dynamic() or LossScale.static(scale)")(LossScale.__new__)


def _before_the_first_step(init_scale: ArrayLike, **configuration: ArrayLike) -> LossScale:
    """Makes the state before the first step; the arguments are not checked."""
    counts = dict.fromkeys(("good_steps", "consecutive_skips", "skipped_steps"), 0)
    # jnp.array copies. With jnp.asarray, `static` would put one buffer into three fields, and a
    # step that donates its state would donate that buffer three times, which is an error.
    return _as_state(jnp.array, {"scale": init_scale, **counts, **configuration})


def _with_array_fields(state: LossScale) -> LossScale:
    """Converts every field to a JAX array of the field's dtype."""
    # A user may write `state._replace(scale=1024)`, and a restored checkpoint may hold NumPy
    # arrays. NumPy would warn where `scale * growth_factor` overflows, and would make int64 and
    # float64 of what is added to it.
    return _as_state(jnp.asarray, state._asdict())


def _as_state(convert: Callable[..., jax.Array], fields: Mapping[str, Any]) -> LossScale:
    """Makes a state of its fields, each converted to an array of the field's dtype."""
    dtypes = {name: jnp.int32 if name in _COUNTS else jnp.float32 for name in fields}
    return LossScale(**{name: convert(value, dtypes[name]) for name, value in fields.items()})


def _increment(count: jax.Array) -> jax.Array:
    """Adds 1, and stays at 2**31 - 1: one more would be the negative number -2**31."""
    return jnp.where(count < MAX_COUNT, count + 1, count)
