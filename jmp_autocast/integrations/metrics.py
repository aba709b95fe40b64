"""Metrics of mixed precision in a run, as scalars for any writer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..inspect import Report
from ..loss_scaling import loss_scale, skipped_steps, step_skipped
from ..loss_scaling.find_state import only_loss_scale
from ..policies.errors import wrong_type


def precision_metrics(
    opt_state: Any = None, report: Report | None = None, *, prefix: str = "precision/"
) -> dict[str, jax.Array]:
    """Returns the loss scale, the skipped steps and the low-precision share by name.

    The dict holds plain scalars for any metrics writer: ``writer.write_scalars(step, metrics)`` of
    clu, ``writer.add_scalar(name, value, step)`` for each pair with TensorBoard, or a log line. It
    also works inside ``jit``, without waiting for the device: return the dict with the other
    metrics of the step.

    Args:
        opt_state: An optimizer state with a loss scale, at any depth; None without loss scaling.
        report: The report of `jmp_autocast.explain` for the loss, which does not change from step
            to step; None to leave the share out.
        prefix: The start of each name; writers group by the part before the slash.

    Returns:
        With ``opt_state``: ``loss_scale`` (float32), ``skipped_steps`` (int32, since the start),
        ``step_skipped`` (int32, 1 if the last update was skipped) and ``consecutive_skips`` (int32,
        for an alarm if training makes no progress). With ``report``: ``low_precision_share``
        (float32), the share of matmul and convolution FLOPs in 16 bits.

    Raises:
        TypeError: Both are None, ``report`` is no report, or ``prefix`` is no string.
        ValueError: ``opt_state`` holds no loss scale, or several.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jmp_autocast import BF16, dynamic_loss_scaling, explain
        >>> from jmp_autocast.integrations.metrics import precision_metrics
        >>> opt_state = dynamic_loss_scaling(optax.sgd(0.1)).init({"w": jnp.ones(2)})
        >>> report = explain(lambda w, x: x @ w, jnp.ones((8, 8)), jnp.ones((2, 8)), policy=BF16)
        >>> for name, value in precision_metrics(opt_state, report).items():
        ...     print(name, value)
        precision/loss_scale 65536.0
        precision/skipped_steps 0
        precision/step_skipped 0
        precision/consecutive_skips 0
        precision/low_precision_share 1.0
    """
    if opt_state is None and report is None:
        raise TypeError(
            "precision_metrics got neither opt_state nor report. Pass the optimizer state that "
            "holds the loss scale, explain(fn, *args), or both."
        )
    if not isinstance(prefix, str):
        raise wrong_type("prefix must be a string", prefix)
    if report is not None and not isinstance(report, Report):
        fix = "Make one with explain(fn, *args, policy=...)."
        raise wrong_type("report must be a Report", report, fix)
    metrics: dict[str, jax.Array] = {}
    if opt_state is not None:
        metrics["loss_scale"] = loss_scale(opt_state)
        metrics["skipped_steps"] = skipped_steps(opt_state)
        # Writers take numbers: TensorBoard has no booleans.
        metrics["step_skipped"] = step_skipped(opt_state).astype(jnp.int32)
        metrics["consecutive_skips"] = jnp.asarray(only_loss_scale(opt_state).consecutive_skips)
    if report is not None:
        metrics["low_precision_share"] = jnp.float32(report.totals.low_share)
    return {prefix + name: value for name, value in metrics.items()}
