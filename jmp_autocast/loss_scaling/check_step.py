"""Does a training step use its loss scale? What it does must not depend on the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .find_state import only_loss_scale
from .scale import LossScale
from .unscale import is_inexact

# A step that is right differs by rounding. One that uses its scale wrongly moves something four
# times as much, or as little, at a quarter of the scale: a difference of 0.75 of the larger.
_QUARTER, _TOLERANCE = 0.25, 0.5


def check_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raises if the result of a training step depends on the loss scale: something is forgotten.

    If you forget to scale the loss, its gradients are divided by the scale all the same: they are
    65,536 times too small. Adam hides that, SGD stops learning, and every type and shape is right.
    A clip or ``optax.MultiSteps`` around the wrapper instead of inside it is a similar mistake. All
    of them make the step depend on the scale, so this function runs the step with the scale and
    with a quarter of it, and compares the changes. Call it once, before training.

    Args:
        step: A training step, jitted or not: a function without side effects that takes the
            optimizer's state, or a `LossScale`, among its arguments and returns it among its
            results.
        *args: Arguments of one call. They are copied: the step may donate them.
        **kwargs: Keyword arguments of the call.

    Raises:
        ValueError: The changes that the step makes depend on the scale, it changes nothing, each
            step is skipped, or the arguments or results hold no loss scale, or several.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling
        >>> from jmp_autocast.loss_scaling import check_step
        >>> tx = dynamic_loss_scaling(optax.sgd(0.1))
        >>> def step(w, opt_state):
        ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)  # scaled_value_and_grad is forgotten
        ...     updates, opt_state = tx.update(grads, opt_state, w)
        ...     return optax.apply_updates(w, updates), opt_state
        >>> w = jnp.ones(2)
        >>> check_step(step, w, tx.init(w))
        Traceback (most recent call last):
            ...
        ValueError: The training step depends on the loss scale: ...
    """
    given = only_loss_scale((args, kwargs))

    def run(scale: float) -> tuple[bool, dict[str, np.ndarray]]:
        replaced = jax.tree.map(
            lambda x: x._replace(scale=jnp.float32(scale)) if isinstance(x, LossScale) else x,
            (args, kwargs),
            is_leaf=lambda x: isinstance(x, LossScale),
        )
        copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, replaced)
        out = step(*copied[0], **copied[1])
        skipped = only_loss_scale(out).consecutive_skips > given.consecutive_skips
        return bool(skipped), _numbers(out)

    scale = float(given.scale)
    skipped, full = run(scale)
    while skipped and scale > 2**-24:  # a new scale may be too large for a float16
        scale /= 16
        skipped, full = run(scale)
    if skipped:
        raise ValueError(
            "The training step is skipped at every loss scale: its gradients are not finite. "
            "jmp_autocast.check_numerics finds the first equation that makes an infinity or NaN."
        )
    # An infinite scale skips the step: what it returns then is what it started from.
    _, before = run(np.inf)
    _, quarter = run(_QUARTER * scale)
    if not any((full[path] != before[path]).any() for path in full):
        raise ValueError(
            "The training step changes nothing: all its gradients are zero. Without a scale "
            "they vanish in float16: use scaled_value_and_grad(loss)(opt_state, ...)."
        )
    found = [
        f"{path} changes {ratio:.2g} times as much"
        for path in full
        if (ratio := _ratio(before[path], full[path], quarter[path])) is not None
    ]
    if found:
        raise ValueError(
            "The training step depends on the loss scale: at a quarter of it "
            f"{', '.join(found[:4])}{', ...' if found[4:] else ''}. The gradients must be "
            "those of the scaled loss, by scaled_value_and_grad(loss)(opt_state, ...), and "
            "clipping, optax.MultiSteps and the like must be inside the wrapper: "
            "dynamic_loss_scaling(optax.chain(clip, optimizer))."
        )


def _numbers(out: Any) -> dict[str, np.ndarray]:
    """Returns the floating leaves of a result by path, those of the loss scale left out."""
    leaves = jax.tree_util.tree_leaves_with_path(out, is_leaf=lambda x: isinstance(x, LossScale))
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).astype(np.float64)
        for path, leaf in leaves
        if not isinstance(leaf, LossScale) and hasattr(leaf, "dtype") and is_inexact(leaf)
    }


def _ratio(before: np.ndarray, full: np.ndarray, quarter: np.ndarray) -> float | None:
    """Returns how much more a value changes at a quarter of the scale, None for as much."""
    with np.errstate(all="ignore"):
        moved, moved_then = full - before, quarter - before
        size, size_then = np.linalg.norm(moved), np.linalg.norm(moved_then)
        error = np.linalg.norm(moved - moved_then)
        is_same = not error > _TOLERANCE * max(size, size_then)
        return None if is_same else float(size_then / size)
