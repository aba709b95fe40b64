"""Steps that are skipped one after the other: training stands still, and nothing says so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .find_state import consecutive_skips, loss_scale
from .scale import LossScale

OnStuck = Literal["ignore", "warn", "raise"]
ON_STUCK: tuple[OnStuck, ...] = ("ignore", "warn", "raise")
# From the largest scale, 2**24, to the smallest, 1, the defaults take 24 steps. What is skipped
# after that is skipped for another reason than the scale.
STUCK_AFTER = 50


def check_progress(
    opt_state: Any, *, on_stuck: OnStuck = "warn", stuck_after: int = STUCK_AFTER
) -> None:
    """Warns, or raises an error, if the last steps were all skipped.

    Call it in a training loop between steps, for example where the loop writes its metrics: it
    waits for the device. ``dynamic_loss_scaling(..., on_stuck="warn")`` checks inside the compiled
    step instead.

    Args:
        opt_state: An optimizer state that holds a `LossScale`, or a `LossScale`.
        on_stuck: ``"warn"`` or ``"raise"``; ``"ignore"`` does nothing.
        stuck_after: How many steps in a row must have been skipped.

    Raises:
        RuntimeError: They were, and ``on_stuck`` is ``"raise"``.
        ValueError: An option is out of range, or there is no loss scale or several.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling
        >>> from jmp_autocast.loss_scaling import check_progress
        >>> tx = dynamic_loss_scaling(optax.sgd(0.1))
        >>> state = tx.init(jnp.ones(2))
        >>> for _ in range(3):
        ...     _, state = tx.update(jnp.array([1.0, jnp.inf]), state)
        >>> check_progress(state, on_stuck="raise", stuck_after=3)
        Traceback (most recent call last):
            ...
        RuntimeError: 3 steps in a row were skipped: ...
    """
    check_options(on_stuck, stuck_after)
    skips, scale = consecutive_skips(opt_state), loss_scale(opt_state)
    if on_stuck != "ignore" and int(skips) >= stuck_after:
        _report(on_stuck, skips, scale)


def check_options(on_stuck: Any, stuck_after: Any) -> None:
    """Raises ValueError for options that `check_progress` does not have."""
    if on_stuck not in ON_STUCK:
        raise ValueError(f"on_stuck must be 'ignore', 'warn' or 'raise', got {on_stuck!r}.")
    # optax.inject_hyperparams makes arrays of all numbers, which may be traced.
    if isinstance(stuck_after, jax.Array):
        return
    if not isinstance(stuck_after, int) or isinstance(stuck_after, bool) or stuck_after < 1:
        raise ValueError(
            f"stuck_after must be a number of steps, an int of at least 1, got {stuck_after!r}."
        )


def progress_reporter(on_stuck: OnStuck, stuck_after: int) -> Callable[[LossScale], None]:
    """Returns what `check_progress` does as a part of a step, which takes the scale after it.

    The host is called in a branch that other steps do not enter: they wait for nothing.

    Args:
        on_stuck: As in `check_progress`; ``"ignore"`` leaves nothing in the program.
        stuck_after: As in `check_progress`; it reports again after as many more.

    Raises:
        ValueError: An option is out of range.
    """
    check_options(on_stuck, stuck_after)

    def report(is_stuck: jax.Array, skips: jax.Array, value: jax.Array) -> None:
        # Under `vmap` a conditional runs both its branches, so that the host has to look again.
        if is_stuck:
            _report(on_stuck, skips, value)

    def look(scale: LossScale) -> None:
        skips = scale.consecutive_skips
        is_stuck = (skips > 0) & (skips % jnp.asarray(stuck_after, jnp.int32) == 0)
        call = functools.partial(jax.debug.callback, report)
        lax.cond(is_stuck, call, lambda *_: None, is_stuck, skips, scale.scale)

    return look if on_stuck != "ignore" else lambda scale: None


def _report(on_stuck: OnStuck, skips: Any, scale: Any) -> None:
    message = (
        f"{int(skips)} steps in a row were skipped: their gradients were not finite, down to a "
        f"loss scale of {float(scale):g}, and the parameters stand still. Most often the forward "
        "pass overflows float16, or the data hold a NaN: jmp_autocast.check_numerics finds the "
        "equation. bfloat16, or full_precision() around what overflows, mends the first."
    )
    if on_stuck == "raise":
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=3)
