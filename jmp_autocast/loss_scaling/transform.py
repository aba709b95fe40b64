"""Optax transformations that unscale gradients, skip bad steps and adapt the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .state import AxisName, LossScaleState, dynamic_loss_scale, static_loss_scale


class LossScalingState(NamedTuple):
    """State of :func:`dynamic_loss_scaling` and :func:`static_loss_scaling`.

    Attributes:
      loss_scale: The :class:`LossScaleState`.
      inner_state: The state of the inner transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from jmp_autocast import dynamic_loss_scaling
      >>> state = dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9)).init(jnp.ones(2))
      >>> print(state.loss_scale.scale, state.inner_state[0].trace)
      65536.0 [0. 0.]
    """

    loss_scale: LossScaleState
    inner_state: optax.OptState


def dynamic_loss_scaling(
    inner: optax.GradientTransformation,
    *,
    init_scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
    min_scale: ArrayLike = 1.0,
    max_scale: ArrayLike = 2.0**24,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for gradients of a scaled loss, with a scale that adapts.

    ``update`` divides the gradients by the scale in float32. Where all of them are finite,
    ``inner`` runs on them. Where one is not, the step is skipped: the updates are zeros (negative
    ones, so that even a parameter of -0.0 keeps its bits), ``inner``'s state stays bit for bit as
    it was, and the scale backs off. The state machine is :meth:`LossScaleState.adjust`.

    What is chained inside ``inner`` sees true gradients, so ``optax.clip_by_global_norm`` belongs
    there. What is chained before the wrapper sees scaled ones, and is covered by the check.

    ``optax.MultiSteps`` belongs inside as well: it then adds up true gradients, and a bad
    micro-batch is left out. Around the wrapper, its accumulator would keep a NaN for ever (optax
    0.2.8 resets it by multiplying it with zero). Gradients that the program itself adds up before
    one ``update`` share a scale; a bad one drops their sum. ``optax.apply_if_finite`` too belongs
    inside, since around the wrapper it hides bad steps from the scale.

    The arguments are read by ``init``; from then on they are part of the state. Arguments given as
    arrays are read again by each ``update``, as ``optax.inject_hyperparams`` needs.

    Args:
      inner: Any optax transformation. Extra arguments of ``update`` reach it as they are, except
        that ``grad``, as line searches take it, is unscaled like the gradients.
      init_scale: As in :func:`dynamic_loss_scale`.
      growth_factor: As in :func:`dynamic_loss_scale`.
      backoff_factor: As in :func:`dynamic_loss_scale`.
      growth_interval: As in :func:`dynamic_loss_scale`.
      min_scale: As in :func:`dynamic_loss_scale`.
      max_scale: As in :func:`dynamic_loss_scale`.
      axis_name: Mapped axis or axes (``shard_map``, ``pmap``) over which one bad shard skips the
        step everywhere. Under ``jit`` with sharded arrays none is needed.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`LossScalingState`.

    Raises:
      TypeError: ``inner`` is no gradient transformation, or an argument is not a number; and at
        ``update``, if its state is not one that ``init`` or ``update`` returned.
      ValueError: An argument is out of range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from jmp_autocast import (
      ...     dynamic_loss_scaling,
      ...     loss_scale,
      ...     scaled_value_and_grad,
      ...     step_skipped,
      ... )
      >>> tx = dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = tx.init(params)
      >>> @jax.jit
      ... def train_step(params, opt_state, x):
      ...     loss = lambda params: jnp.sum(params["w"] * x)
      ...     value, grads = scaled_value_and_grad(loss)(opt_state, params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, value
      >>> params, opt_state, value = train_step(params, opt_state, jnp.array([1.0, jnp.inf]))
      >>> print(params["w"], step_skipped(opt_state), loss_scale(opt_state))
      [1. 1.] True 32768.0
    """
    configuration = {
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "min_scale": min_scale,
        "max_scale": max_scale,
    }

    def initial() -> LossScaleState:
        return dynamic_loss_scale(init_scale, **configuration)

    initial()  # so that what is wrong is said here
    injected = {n: v for n, v in configuration.items() if isinstance(v, jax.Array)}

    def current(state: LossScaleState) -> LossScaleState:
        return state._replace(**injected)

    return _loss_scaling("dynamic_loss_scaling", inner, initial, current, axis_name)


def static_loss_scaling(
    inner: optax.GradientTransformation, scale: ArrayLike, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for gradients of a scaled loss, with a scale that never moves.

    All else is as in :func:`dynamic_loss_scaling`, the skipping of bad steps too.

    Args:
      inner: Any optax transformation.
      scale: The scale; a normal, finite float32 number above 0.
      axis_name: As in :func:`dynamic_loss_scaling`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`LossScalingState`.

    Raises:
      TypeError: ``inner`` is no gradient transformation, or the scale is not a number.
      ValueError: The scale is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from jmp_autocast import static_loss_scaling
      >>> tx = static_loss_scaling(optax.sgd(1.0), 128.0)
      >>> updates, _ = tx.update(jnp.array([256.0]), tx.init(jnp.ones(1)))
      >>> print(updates)
      [-2.]
    """
    static_loss_scale(scale)
    return _loss_scaling(
        "static_loss_scaling",
        inner,
        lambda: static_loss_scale(scale),
        lambda state: state,
        axis_name,
    )


def _loss_scaling(
    name: str,
    inner: optax.GradientTransformation,
    initial: Callable[[], LossScaleState],
    current: Callable[[LossScaleState], LossScaleState],
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{name} wraps an optax gradient transformation such as optax.adam(1e-3), got "
            f"{inner!r}."
        )
    if not isinstance(axis_name, Hashable):
        raise TypeError(
            f"axis_name has to be the name of a mapped axis or a tuple of names, got {axis_name!r}."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScalingState:
        return LossScalingState(loss_scale=initial(), inner_state=inner.init(params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScalingState]:
        if not isinstance(state, LossScalingState):
            raise TypeError(
                f"The state that {name} updates has to be a LossScalingState, from its init or its "
                f"last update; got {type(state).__name__}. The arguments of update are (gradients, "
                "state, params)."
            )
        scale = current(state.loss_scale)
        _, finite = scale.unscale(updates, axis_name)

        # Unscaling again inside lets XLA fuse it into the optimizer: no unscaled copy is stored.
        @jax.jit
        def run(updates: optax.Updates, inner_state: optax.OptState) -> tuple[Any, Any]:
            grads, _ = scale.unscale(updates)
            unscaled = {n: scale.unscale(extra_args[n])[0] for n in ("grad",) if n in extra_args}
            updates, new_inner_state = inner.update(
                grads, inner_state, params, **(extra_args | unscaled)
            )
            return updates, jax.tree.map(_with_dtype_of, inner_state, new_inner_state)

        def skip(updates: optax.Updates, inner_state: optax.OptState) -> tuple[Any, Any]:
            return jax.tree.map(_nothing, out_types), inner_state

        out_types, _ = jax.eval_shape(run, updates, state.inner_state)
        updates, inner_state = jax.lax.cond(finite, run, skip, updates, state.inner_state)
        return updates, LossScalingState(scale.adjust(finite), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _nothing(leaf: Any) -> jax.Array:
    """An update that keeps a parameter's bits: -0.0 + -0.0 is -0.0, and -0.0 + 0.0 is not."""
    zeros = jnp.zeros_like(leaf)
    return -zeros if jnp.issubdtype(zeros.dtype, jnp.inexact) else zeros


def _with_dtype_of(old: Any, new: Any) -> Any:
    """Gradients of 16-bit parameters arrive in float32, which must not widen what is stored."""
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else new.astype(dtype)
