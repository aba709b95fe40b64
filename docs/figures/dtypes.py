"""One training in four dtypes: its loss, and what it keeps for the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from jmp_autocast import (
    BF16,
    FP16,
    Float8,
    Policy,
    autocast,
    dynamic_loss_scaling,
    keep_less,
    scaled_value_and_grad,
    static_loss_scaling,
)
from jmp_autocast.inspect import explain_kept

from .style import Style

STEPS, LENGTH, WIDTH, TOKENS = 150, 16, 32, 32

FLOAT8 = Policy(jnp.bfloat16, matmul=Float8(emulate=True, minimum=1))


@dataclasses.dataclass(frozen=True)
class Training:
    """One training.

    Args:
        losses: The loss of each step.
        nbytes: What one step keeps for its backward pass, in bytes.
        less: What it keeps with ``residuals="recompute"``, in bytes.
    """

    losses: np.ndarray
    nbytes: int
    less: int


def norm(x: jax.Array) -> jax.Array:
    """Returns each token's vector with mean 0 and variance 1."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The cross-entropy of the next token, of a transformer with one block."""
    x = params["embedding"][tokens[:, :-1]] + params["positions"]
    q, k, v = (norm(x) @ params[name] for name in "qkv")
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
    visible = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    x = x + jax.nn.softmax(jnp.where(visible, scores, -1e30)) @ v @ params["out"]
    x = x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]
    logits = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def weights() -> Any:
    """Returns the first parameters."""
    shapes = {
        "embedding": (TOKENS, WIDTH),
        "positions": (LENGTH, WIDTH),
        **dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH)),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "head": (WIDTH, TOKENS),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batch(step: jax.Array) -> jax.Array:
    """Returns sequences that count by a step of their own: the next token follows from two."""
    first, by = jax.random.randint(jax.random.fold_in(jax.random.key(1), step), (2, 16, 1), 0, 8)
    return (first + by * jnp.arange(LENGTH + 1)) % TOKENS


def train(policy: Any, tx: Any) -> Training:
    """Trains for `STEPS` steps; ``policy`` None for float32."""
    mixed = functools.partial(autocast, policy=policy)
    fn, less = (
        (loss, keep_less(loss, residuals="recompute"))
        if policy is None
        else (mixed(loss), mixed(loss, residuals="recompute"))
    )
    params = weights()

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        value, grads = scaled_value_and_grad(fn)(state, params, batch(i))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(STEPS))[1])
    kept = explain_kept(less, params, batch(jnp.array(0)))
    losses = np.asarray(run((params, tx.init(params))))
    return Training(losses, kept.declared_nbytes or 0, kept.nbytes or 0)


def data() -> dict[str, Training]:
    """Trains in each dtype, from the same weights and with the same batches."""
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    return {
        "float32": train(None, static_loss_scaling(adam, 1.0)),
        "bfloat16": train(BF16, static_loss_scaling(adam, 1.0)),
        "float16": train(FP16, dynamic_loss_scaling(adam)),
        "float8": train(FLOAT8, static_loss_scaling(adam, 1.0)),
    }


def draw(found: dict[str, Training], style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.2, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = dict(zip(found, (style.full, style.low, style.cast, style.good), strict=True))
    for width, (name, training) in zip((4.5, 2.4, 1.2, 1.2), found.items(), strict=True):
        smooth = np.convolve(training.losses, np.full(5, 0.2), "valid")
        left.plot(smooth, color=colors[name], linewidth=width, label=name)
    left.set_xlabel("step")
    left.set_ylabel("loss")
    left.set_ylim(0)
    left.legend(loc="upper right")
    for place, (name, training) in enumerate(found.items()):
        for nbytes, y, alpha in (
            (training.nbytes, place - 0.2, 1.0),
            (training.less, place + 0.2, 0.45),
        ):
            right.barh(y, nbytes / 1e6, height=0.36, color=colors[name], alpha=alpha)
            right.text(nbytes / 1e6, y, f" {nbytes / 1e6:.1f} MB", va="center", size=8)
    right.set_yticks(range(len(found)), list(found))
    right.invert_yaxis()
    right.tick_params(axis="y", length=0)
    right.margins(x=0.2)
    right.set_xlabel('kept for the backward pass;\npale: with residuals="recompute"')
    figure.subplots_adjust(left=0.07, right=0.99, top=0.97, bottom=0.2, wspace=0.28)
    return figure
