"""Fits a neural ODE with Equinox and diffrax in float32, bfloat16 and float16.

The network is the vector field of an ordinary differential equation. It learns how points move on
damped spirals, from their positions alone: the loss differentiates through the solver. `autocast`
goes around that loss. The matmuls of the vector field run in 16 bits. Times and positions stay
float32, and so do the sums of a solver's stages: diffrax asks for the highest precision there::

    python examples/train_neural_ode.py
    python examples/train_neural_ode.py --dtype bfloat16 --steps 100

It prints, for each dtype, the loss (and its ratio to that of float32), the root mean square error
on new trajectories, solved in float32, the share of a gradient step's arithmetic in 16 bits and the
skipped steps. It draws the losses, and the new trajectories as each of the runs predicts them.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from runs import (
    COLORS,
    Run,
    add_numbers,
    finish,
    folder_of,
    low_share,
    make_parser,
    optimizer_for,
    run_all,
)

from jmp_autocast import autocast, scaled_value_and_grad, skipped_steps

TIMES = np.linspace(0, 5, 26, dtype=np.float32)


class Field(eqx.Module):
    """The velocity at a point, from a network of its cubed coordinates."""

    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array) -> None:
        self.mlp = eqx.nn.MLP(2, 2, width, 2, activation=jnp.tanh, key=key)

    def __call__(self, t: jax.Array, y: jax.Array, args: Any) -> jax.Array:
        return self.mlp(y**3)


def solve(field: Callable[..., jax.Array], start: jax.Array) -> jax.Array:
    """Returns the positions (times, 2) of a point that starts there.

    Steps of one size: an adaptive solver would take the rounding of a 16-bit field for its own
    error, and make its steps smaller than they need to be.
    """
    times = jnp.asarray(TIMES)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Heun(),
        t0=times[0],
        t1=times[-1],
        dt0=0.1,
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
    )
    assert solution.ys is not None
    return solution.ys


def truth(t: jax.Array, y: jax.Array, args: Any) -> jax.Array:
    """The field to learn: a spiral that loses energy."""
    return y**3 @ jnp.array([[-0.1, -2.0], [2.0, -0.1]], jnp.float32)


def trajectories(key: jax.Array, number: int) -> jax.Array:
    """Returns positions (number, times, 2) of points that start at random places."""
    radius, angle = jax.random.uniform(key, (2, number))
    start = (0.8 + 0.6 * radius) * jnp.stack(
        [jnp.cos(2 * np.pi * angle), jnp.sin(2 * np.pi * angle)]
    )
    return jax.jit(jax.vmap(lambda y: solve(truth, y)))(start.T)


def train_field(
    dtype: str,
    options: argparse.Namespace,
    data: jax.Array,
    new: jax.Array,
    on_step: Callable[[], None],
) -> tuple[Run, np.ndarray]:
    """Fits a field in a dtype; returns the run and what it predicts of new trajectories."""
    low = dtype != "float32"
    field = eqx.filter_jit(Field)(options.width, jax.random.key(options.seed + 1))
    params, static = eqx.partition(field, eqx.is_inexact_array)

    def loss_fn(params: Any, positions: jax.Array) -> jax.Array:
        found = jax.vmap(lambda y: solve(eqx.combine(params, static), y))(positions[:, 0])
        return jnp.mean((found - positions) ** 2)

    fast_loss = autocast(loss_fn, dtype) if low else loss_fn
    tx = optimizer_for(dtype, optax.adam(optax.cosine_decay_schedule(1e-2, options.steps)))

    @jax.jit
    def step(params: Any, opt_state: Any, positions: jax.Array) -> Any:
        loss, grads = scaled_value_and_grad(fast_loss)(opt_state, params, positions)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    rng = np.random.default_rng(options.seed)
    for _ in range(options.steps):
        batch = data[rng.choice(len(data), options.batch_size, replace=False)]
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        on_step()

    trained = eqx.combine(params, static)
    found = jax.jit(jax.vmap(lambda y: solve(trained, y)))(new[:, 0])
    error = float(jnp.sqrt(jnp.mean((found - new) ** 2)))
    share = low_share(jax.grad(fast_loss), params, batch)
    run = Run(dtype, losses, error, share, int(skipped_steps(opt_state)))
    return run, np.asarray(found)


def draw(predicted: dict[str, np.ndarray], exact: np.ndarray, path: pathlib.Path) -> None:
    """Draws some of the new trajectories, exact and as predicted."""
    figure = Figure(figsize=(4 * len(predicted), 4), layout="constrained")
    axes = figure.subplots(1, len(predicted), squeeze=False, sharex=True, sharey=True)[0]
    for ax, (dtype, found) in zip(axes, predicted.items(), strict=True):
        for true, mine in list(zip(exact, found, strict=True))[:6]:
            ax.plot(*true.T, color="gray", linestyle=":")
            ax.plot(*mine.T, color=COLORS[dtype])
        ax.set(title=f"trained in {dtype}", aspect="equal")
    figure.suptitle("New trajectories: exact (dotted) and predicted")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Trains as the command line asks for; returns the runs."""
    parser, console = make_parser(__doc__, steps=400), Console()
    numbers = {"width": (32, "features of the field"), "batch-size": (64, "trajectories per step")}
    add_numbers(parser, numbers)
    options = parser.parse_args(argv)
    folder, predicted = folder_of(options, "neural_ode"), {}
    data, new = jnp.split(trajectories(jax.random.key(options.seed), 288), [256])

    def train(dtype: str, options: argparse.Namespace, on_step: Callable[[], None]) -> Run:
        run, predicted[dtype] = train_field(dtype, options, data, new, on_step)
        return run

    runs = run_all(options, console, train)
    draw(predicted, np.asarray(new), folder / "trajectories.png")
    finish(runs, "Neural ODE (Equinox, diffrax)", "error on new\ntrajectories", folder, console)
    console.print(f"Picture: {folder / 'trajectories.png'}", soft_wrap=True)
    return runs


if __name__ == "__main__":
    main()
