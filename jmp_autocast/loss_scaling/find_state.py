"""Functions that read the loss scale inside an optimizer state."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..policies.errors import a
from .scale import ScaleState


def loss_scale(opt_state: Any) -> jax.Array:
    """Returns the loss scale inside an optimizer state.

    Args:
        opt_state: A pytree that holds one `LossScalingState` at any depth: the state of
            ``optax.chain``, a Flax ``TrainState``, an ``nnx.Optimizer``.

    Returns:
        float32 scalar array: the factor by which the next loss is multiplied.

    Raises:
        ValueError: ``opt_state`` holds no loss scale, or several.

    Example:
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling
        >>> from jmp_autocast.loss_scaling import loss_scale
        >>> tx = optax.chain(dynamic_loss_scaling(optax.adam(1e-3)), optax.scale(0.5))
        >>> print(loss_scale(tx.init({"w": 1.0})))
        65536.0
    """
    check_order(opt_state, stacklevel=3)
    return jnp.asarray(only_loss_scale(opt_state).scale)


def step_skipped(opt_state: Any) -> jax.Array:
    """Returns whether the last ``update`` was skipped because a gradient was not finite.

    Args:
        opt_state: As in `loss_scale`.

    Returns:
        bool scalar array; False before the first update.

    Raises:
        ValueError: ``opt_state`` holds no loss scale, or several.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling
        >>> from jmp_autocast.loss_scaling import loss_scale, step_skipped
        >>> tx = dynamic_loss_scaling(optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> _, opt_state = tx.update(jnp.array([1.0, jnp.inf]), opt_state)
        >>> print(step_skipped(opt_state), loss_scale(opt_state))
        True 32768.0
    """
    return jnp.asarray(only_loss_scale(opt_state).consecutive_skips) > 0


def skipped_steps(opt_state: Any) -> jax.Array:
    """Returns the number of skipped steps since the start.

    Args:
        opt_state: As in `loss_scale`.

    Returns:
        int32 scalar array.

    Raises:
        ValueError: ``opt_state`` holds no loss scale, or several.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling, skipped_steps
        >>> tx = dynamic_loss_scaling(optax.sgd(0.1))
        >>> print(skipped_steps(tx.init(jnp.ones(2))))
        0
    """
    return jnp.asarray(only_loss_scale(opt_state).skipped_steps)


def _comes_late(node: Any) -> bool:
    """Returns whether a node is the state of a chain in which loss scaling is not first."""
    if type(node) is not tuple:
        return False
    places = [i for i, part in enumerate(node) if hasattr(part, "loss_scale")]
    # Only states of optax count: a pair of parameters and a state is a tuple, too.
    before = node[: places[0]] if places else ()
    return any(type(part).__module__.startswith("optax.") for part in before)


_AROUND = {
    optax.MultiStepsState: (
        "optax.MultiSteps is around the loss scaling: it adds up scaled gradients, so that "
        "one bad batch spoils the sum, and its accumulator may keep a NaN. Write "
        "dynamic_loss_scaling(optax.MultiSteps(optimizer, k))."
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite is around the loss scaling, and hides steps that are not finite "
        "from the scale, which then backs off late, or never. dynamic_loss_scaling skips them: "
        "leave it out, or write dynamic_loss_scaling(optax.apply_if_finite(optimizer, n))."
    ),
}
_LATE = (
    "A transformation is before the loss scaling in optax.chain, and sees gradients that "
    "are still multiplied by the scale: a clip there clips each of them, a weight decay is "
    "lost. Write dynamic_loss_scaling(optax.chain(clip, optimizer))."
)


def check_order(opt_state: Any, stacklevel: int) -> None:
    """Warns if an optax transformation is around or before the loss scaling but belongs inside."""
    for kind, message in _AROUND.items():
        nodes = jax.tree.leaves(opt_state, is_leaf=lambda node, kind=kind: isinstance(node, kind))
        if any(isinstance(node, kind) and has_loss_scale(node) for node in nodes):
            warnings.warn(message, stacklevel=stacklevel)
    if any(map(_comes_late, jax.tree.leaves(opt_state, is_leaf=_comes_late))):
        warnings.warn(_LATE, stacklevel=stacklevel)


def only_loss_scale(opt_state: Any, where: str = "") -> ScaleState:
    """Returns the only `ScaleState` in a pytree, at any depth.

    Args:
        opt_state: The pytree.
        where: Text that the error message adds after the type of ``opt_state``.
    """
    found = _found(opt_state)
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ValueError(
            f"No loss scale in this state ({a(type(opt_state).__name__)}){where}. It must "
            "come from the init of an optimizer that contains dynamic_loss_scaling(...) or "
            f"static_loss_scaling(...).{_instead(opt_state)}"
        )
    places = ", ".join(path for path, _ in found)
    raise ValueError(
        f"{len(found)} loss scales in this state, at {places}. Pass the part that holds the one "
        "you mean, or put one dynamic_loss_scaling around the whole optimizer."
    )


def _instead(state: Any) -> str:
    """Returns the fix to suggest for a value without a loss scale."""
    if callable(getattr(state, "init", None)) and callable(getattr(state, "update", None)):
        return " This is the optimizer: pass its state, opt_state = tx.init(params)."
    parts = state if isinstance(state, tuple | list) else ()
    if any(type(node).__module__.startswith("optax") for node in (state, *parts)):
        return " This optimizer has none: wrap it, tx = dynamic_loss_scaling(optax.adam(1e-3))."
    return ""


def has_loss_scale(tree: Any) -> bool:
    """Returns whether a pytree holds a `ScaleState`."""
    return bool(_found(tree))


def _found(tree: Any) -> list[tuple[str, ScaleState]]:
    """Returns the scales in a pytree, each with its path."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, ScaleState))
    return [(jax.tree_util.keystr(path), x) for path, x in nodes if isinstance(x, ScaleState)]
