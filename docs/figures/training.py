"""Loss and scale of a small training in float16, with and without loss scaling."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    static_loss_scaling,
    step_skipped,
)

from .style import Style

STEPS = 400


@dataclasses.dataclass(frozen=True)
class Curve:
    """One training."""

    losses: np.ndarray
    scales: np.ndarray
    skipped: np.ndarray


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a network with one hidden layer."""
    hidden = jnp.tanh(x @ params["w1"])
    return jnp.mean(jnp.square(hidden @ params["w2"] - y))


def problem() -> tuple[Any, jax.Array, jax.Array]:
    """Returns first parameters, and data that a network of the same shape made.

    The targets are about 0.003, and the error is a mean over 256 x 128 elements: gradients by
    the outputs are about 1e-7, where float16 has its smallest numbers.
    """
    keys = jax.random.split(jax.random.key(0), 5)

    def weights(key1: jax.Array, key2: jax.Array) -> Any:
        w1 = jax.random.normal(key1, (32, 128)) / 32**0.5
        return {"w1": w1, "w2": 0.0025 * jax.random.normal(key2, (128, 128)) / 128**0.5}

    x = jax.random.normal(keys[4], (256, 32))
    teacher = weights(keys[2], keys[3])
    y = jnp.tanh(x @ teacher["w1"]) @ teacher["w2"]
    return weights(keys[0], keys[1]), x, y


def train(compute_dtype: Any, tx: Any) -> Curve:
    """Trains for `STEPS` steps; ``compute_dtype`` None for float32."""
    params, x, y = problem()
    fn = loss if compute_dtype is None else autocast(loss, compute_dtype)

    @jax.jit
    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        value, grads = scaled_value_and_grad(fn)(state, params, x, y)
        scale = loss_scale(state)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (value, scale, step_skipped(state))

    _, curves = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
    return Curve(*map(np.asarray, curves))


def data() -> dict[str, Curve]:
    """Trains with a dynamic scale, without a scale, and in float32.

    The scale grows more often than by default, and without its default bound of 2**24, so that it
    reaches the largest number of float16.
    """
    optimizer = optax.adam(3e-4, eps=1e-15)
    unscaled = static_loss_scaling(optimizer, 1.0)
    dynamic = dynamic_loss_scaling(optimizer, growth_interval=12, max_scale=2.0**60)
    return {
        "float32": train(None, unscaled),
        "float16": train(jnp.float16, dynamic),
        "unscaled": train(jnp.float16, unscaled),
    }


def draw(curves: dict[str, Curve], style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.2, 4.6))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    shown = {
        "unscaled": ("float16 without a scale", style.faint, 1.6),
        "float32": ("float32", style.full, 2.6),
        "float16": ("float16 with dynamic_loss_scaling", style.low, 1.3),
    }
    for name, (label, color, width) in shown.items():
        top.plot(curves[name].losses, color=color, linewidth=width, label=label)
    top.set_yscale("log")
    top.set_yticks([1e-7, 3e-7, 1e-6, 3e-6], ["1e-7", "3e-7", "1e-6", "3e-6"])
    top.minorticks_off()
    top.set_ylabel("loss")
    top.legend(loc="upper right")
    scaled = curves["float16"]
    bottom.step(range(STEPS), scaled.scales, where="post", color=style.low, linewidth=1.5)
    (skips,) = np.nonzero(scaled.skipped)
    bottom.plot(
        skips, scaled.scales[skips], "x", color=style.cast, markersize=7, markeredgewidth=2,
        label="step skipped", linestyle="none",
    )  # fmt: skip
    bottom.set_yscale("log", base=2)
    bottom.set_ylabel("scale")
    bottom.set_xlabel("step")
    bottom.legend(loc="lower right")
    figure.subplots_adjust(left=0.09, right=0.98, top=0.98, bottom=0.11, hspace=0.12)
    return figure
