"""float16 training of Equinox models: filtered gradients of a scaled loss.

`jmp_autocast.autocast` takes Equinox models without an adapter. Gradients need this module, because
`jax.grad` refuses the leaves of a model that are no arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import optax

from ..loss_scaling.find_state import has_loss_scale
from ..loss_scaling.gradients import scaled_by
from ..policies.errors import a

__all__ = ["apply_gradients", "scaled_value_and_grad"]


def scaled_value_and_grad(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Like ``eqx.filter_value_and_grad``, but the gradients are multiplied by a loss scale.

    Use it in place of `jmp_autocast.scaled_value_and_grad` for a model with leaves that are no
    arrays, such as activation functions.

    Args:
        fn: The loss, which is differentiated by the floating arrays of its first argument. It
            returns a floating scalar, or a pair of a floating scalar and auxiliary data.
        has_aux: Whether ``fn`` returns a pair of the loss and auxiliary data.

    Returns:
        A function ``(scale, model, *args, **kwargs) -> (value, grads)``. The scale is a number or
        an optimizer state that holds one. The loss is unscaled. The gradients are scaled; their
        tree is that of the model, with None for leaves without a gradient.

    Raises:
        TypeError: At the call: the loss is not a floating scalar, or ``has_aux`` is set and ``fn``
            returns no pair.
        ValueError: At the call: the optimizer state holds no loss scale, or several.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from jmp_autocast.integrations.equinox import scaled_value_and_grad
        >>> net = eqx.nn.MLP(8, "scalar", 8, 1, key=jax.random.key(0))
        >>> value, grads = scaled_value_and_grad(lambda net, x: net(x))(1024.0, net, jnp.ones(8))
        >>> print(grads.layers[1].bias, grads.activation)
        [1024.] None
    """
    return scaled_by(lambda scaled: eqx.filter_grad(scaled, has_aux=True), fn, has_aux)


def apply_gradients(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, model: Any
) -> tuple[Any, Any]:
    """Applies an optimizer's update to the floating arrays of a model.

    Args:
        tx: The optimizer, such as `jmp_autocast.dynamic_loss_scaling` around an optax optimizer.
            Its state is ``tx.init(eqx.filter(model, eqx.is_inexact_array))``.
        grads: The gradients of `scaled_value_and_grad`.
        opt_state: The optimizer's state.
        model: The model.

    Returns:
        The model and the optimizer's state after the step. If the step is skipped, the model is
        unchanged. An ``eqx.nn.State`` from the loss is not restored; to restore it, select each
        leaf: ``jnp.where(step_skipped(opt_state), old, new)``.

    Raises:
        TypeError: ``grads`` holds a loss scale and ``opt_state`` does not, so the two are
            exchanged.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, optax
        >>> from jmp_autocast import autocast, dynamic_loss_scaling
        >>> from jmp_autocast.integrations.equinox import apply_gradients, scaled_value_and_grad
        >>> net = eqx.nn.MLP(8, "scalar", 8, 1, key=jax.random.key(0))
        >>> tx = dynamic_loss_scaling(optax.sgd(0.5), init_scale=8.0)
        >>> opt_state = tx.init(eqx.filter(net, eqx.is_inexact_array))
        >>> loss = autocast(lambda net, x: net(x), jnp.float16)
        >>> @eqx.filter_jit
        ... def step(net, opt_state, x):
        ...     value, grads = scaled_value_and_grad(loss)(opt_state, net, x)
        ...     return apply_gradients(tx, grads, opt_state, net)
        >>> after, opt_state = step(net, opt_state, jnp.ones(8))
        >>> print(after.layers[1].bias - net.layers[1].bias)
        [-0.5]
    """
    if has_loss_scale(grads) and not has_loss_scale(opt_state):
        raise TypeError(
            f"apply_gradients got {a(type(grads).__name__)} that holds a loss scale for the "
            f"gradients, and {a(type(opt_state).__name__)} for the state. Its arguments are (tx, "
            "grads, opt_state, model)."
        )
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    # Updates of 16-bit weights are float32. `optax.apply_updates` keeps the dtype of the weights;
    # `eqx.apply_updates` would return float32 weights.
    return eqx.combine(optax.apply_updates(params, updates), rest), opt_state
