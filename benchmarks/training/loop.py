"""The training loop: one compiled program for all seeds of a model in one precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison.counts import casts_and_dots, low_share

from jmp_autocast import (
    dynamic_loss_scaling,
    scaled_value_and_grad,
    select_on_finite,
    skipped_steps,
    static_loss_scaling,
    step_skipped,
)

from .programs import Precision, Program, Task, Tree


class Start(NamedTuple):
    """What all precisions of a model have in common, with a first axis of seeds in each array.

    Attributes:
        params: The first parameters.
        state: The first state.
        batches: The batches, with a second axis of steps.
        last: The batch that `Program.score` reads.
    """

    params: Tree
    state: Tree
    batches: Tree
    last: Tree


class Outcome(NamedTuple):
    """What a training came to.

    Attributes:
        scores: float32[seeds], the lower the better.
        losses: float32[seeds, steps].
        skipped: int32[seeds], the steps that loss scaling skipped.
        low_flops: The share of the arithmetic of matmuls and convolutions of a gradient that is in
            16 bits.
        seconds: Time to trace, compile and run.
    """

    scores: np.ndarray
    losses: np.ndarray
    skipped: np.ndarray
    low_flops: float
    seconds: float


def start(task: Task, seeds: Sequence[int], steps: int) -> Start:
    """Returns parameters and data of all seeds."""
    program = task.make(None)

    def of_seed(seed: jax.Array) -> Start:
        first, stream, last = jax.random.split(jax.random.key(seed), 3)
        batches = jax.vmap(program.batch)(jax.random.split(stream, steps))
        return Start(*program.init(first), batches, program.batch(last))

    return jax.jit(lambda seeds: jax.lax.map(of_seed, seeds))(jnp.asarray(seeds))


def optimizer(task: Task, steps: int, scaled: bool) -> optax.GradientTransformationExtraArgs:
    """Returns AdamW with warm-up, cosine decay and clipping, and with a loss scale around them.

    Without warm-up and clipping one sharp point makes a training differ from itself by more than
    rounding does.
    """
    rate = optax.warmup_cosine_decay_schedule(0, task.rate, max(1, steps // 10), steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    tx = optax.flatten(tx)  # one array compiles faster than thirty
    return dynamic_loss_scaling(tx) if scaled else static_loss_scaling(tx, 1.0)


def gradient(program: Program, precision: Precision) -> Callable[..., Any]:
    """Returns the function from a loss scale, parameters, state and batch to loss and gradients."""
    return scaled_value_and_grad(precision.cast(program.loss), has_aux=True)


def train(task: Task, precision: Precision, begin: Start) -> Outcome:
    """Trains from all seeds."""
    program = task.make(precision.dtype)
    seeds, steps = jax.tree.leaves(begin.batches)[0].shape[:2]
    tx = optimizer(task, steps, precision.scaled)
    take_gradient = gradient(program, precision)

    def step(carry: Any, batch: Tree) -> Any:
        params, state, opt_state = carry
        (loss, new_state), grads = take_gradient(opt_state, params, state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        state = select_on_finite(~step_skipped(opt_state), new_state, state)
        return (optax.apply_updates(params, updates), state, opt_state), loss

    def one(begin: Start) -> tuple[jax.Array, jax.Array, jax.Array]:
        carry = begin.params, begin.state, tx.init(begin.params)
        (params, state, opt_state), losses = jax.lax.scan(step, carry, begin.batches)
        if program.score is None:
            score = jnp.mean(losses[-max(1, steps // 10) :])
        else:
            score = precision.cast(program.score)(params, state, begin.last)
        return score, losses, skipped_steps(opt_state)

    since = time.perf_counter()
    run = jax.jit(lambda begin: jax.lax.map(one, begin, batch_size=seeds if task.together else 1))
    scores, losses, skipped = map(np.asarray, run(begin))
    seconds = time.perf_counter() - since
    return Outcome(scores, losses, skipped, low_flops(task, precision), seconds)


def low_flops(task: Task, precision: Precision) -> float:
    """Returns the share of the arithmetic of a model's gradient that is in 16 bits."""
    program = task.make(precision.dtype)

    def example(key: jax.Array) -> Any:
        return *program.init(key), program.batch(key)

    arguments = jax.eval_shape(example, jax.random.key(0))
    closed = jax.make_jaxpr(gradient(program, precision))(jnp.float32(1), *arguments)
    _, dots = casts_and_dots(closed, 0, 0)
    return low_share(dots)
