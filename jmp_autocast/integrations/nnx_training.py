"""float16 training of Flax NNX models: gradients of a scaled loss, and training steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..loss_scaling import step_skipped
from ..loss_scaling.gradients import scaled_by
from ..policies.errors import a
from .flax_compat import raw_value


def scaled_value_and_grad(
    fn: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Like ``nnx.value_and_grad``, but the gradients are multiplied by a loss scale.

    This is `jmp_autocast.scaled_value_and_grad` for functions of NNX modules: only parameters are
    differentiated, and the call updates the modules (batch statistics, RNG counters).

    Args:
        fn: The loss, a function of modules that returns a floating scalar, or a pair of a floating
            scalar and auxiliary data. It may be wrapped by this module's `autocast`.
        argnums: As in ``nnx.value_and_grad``; the scale is not counted.
        has_aux: Whether ``fn`` returns a pair of the loss and auxiliary data.

    Returns:
        A function ``(scale, *args, **kwargs) -> (value, grads)``. The scale is a number, or an
        ``nnx.Optimizer`` of `jmp_autocast.dynamic_loss_scaling`. The loss is unscaled. The
        gradients are scaled; pass them to the optimizer's ``update``.

    Raises:
        TypeError: At the call: the loss is not a floating scalar, or ``has_aux`` is set and ``fn``
            returns no pair.
        ValueError: At the call: the optimizer holds no loss scale, or several.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jmp_autocast.integrations.nnx import scaled_value_and_grad
        >>> net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> loss = lambda net, x: jnp.sum(net(x))
        >>> value, grads = scaled_value_and_grad(loss)(1024.0, net, jnp.ones((1, 2)))
        >>> print(grads["bias"][...])
        [1024.]
    """
    return scaled_by(lambda scaled: nnx.grad(scaled, argnums=argnums, has_aux=True), fn, has_aux)


def train_step(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Makes a training step with loss scaling; a skipped step leaves the model unchanged.

    The step scales the loss, differentiates, and updates. If a gradient is not finite, the
    optimizer skips the step, and BatchNorm statistics and other variables that the call has changed
    are restored. RNG counters still advance, so that the next step draws other numbers.

    Args:
        fn: As in `scaled_value_and_grad`; its first argument is the model.
        has_aux: As in `scaled_value_and_grad`.

    Returns:
        A function ``(optimizer, model, *args, **kwargs) -> value`` for use in ``nnx.jit``. The
        optimizer is an ``nnx.Optimizer`` of `jmp_autocast.dynamic_loss_scaling`. The step updates
        the optimizer and the model in place. ``value`` is the loss, or the pair of the loss and the
        auxiliary data.

    Raises:
        TypeError: As `scaled_value_and_grad`.
        ValueError: As `scaled_value_and_grad`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from jmp_autocast import dynamic_loss_scaling
        >>> from jmp_autocast.integrations.nnx import autocast, train_step
        >>> from jmp_autocast.loss_scaling import step_skipped
        >>> net = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> tx = dynamic_loss_scaling(optax.adam(1e-3))
        >>> optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
        >>> @autocast(policy=jnp.float16)
        ... def loss(net, x):
        ...     return jnp.mean((net(x) - 1) ** 2)
        >>> step = nnx.jit(train_step(loss))
        >>> value = step(optimizer, net, jnp.array([[1.0, 2.0], [jnp.inf, 0.0]]))
        >>> print(step_skipped(optimizer), net.mean[...])
        True [0. 0.]
    """

    @functools.wraps(fn)
    def step(optimizer: nnx.Optimizer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, nnx.Optimizer) and not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"train_step({getattr(fn, '__name__', 'loss')}) is called with the optimizer "
                f"first, got {a(type(optimizer).__name__)} and {a(type(model).__name__)}. Write "
                "step(optimizer, model, ...)."
            )
        before = _statistics(optimizer, model)
        # The loss is differentiated by the variables that the optimizer updates.
        gradient = scaled_value_and_grad(fn, nnx.DiffState(0, optimizer.wrt), has_aux)
        value, grads = gradient(optimizer, model, *args, **kwargs)
        optimizer.update(model, grads)
        skipped, held = step_skipped(optimizer), []
        for path, new in _statistics(optimizer, model).items():
            if path in before:
                old, new = jnp.asarray(before[path]), jnp.asarray(new)
                held.append((path, lax.select_n(skipped, new, old)))
        nnx.update(model, nnx.from_flat_state(held))
        return value

    return step


def _statistics(optimizer: nnx.Optimizer, model: Any) -> dict[Any, Any]:
    """Returns, by path, the values of variables that no optimizer or RNG stream updates."""
    state = nnx.state(model, nnx.All(nnx.Not(optimizer.wrt), nnx.Not(nnx.RngState)))
    return {path: raw_value(leaf) for path, leaf in nnx.to_flat_state(state)}
