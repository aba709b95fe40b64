"""A policy that learns from its own trials: PPO (Schulman et al., 2017) on a pole on a cart."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .layers import mlp, mlp_params
from .programs import Program, Tree

DISCOUNT, SMOOTHING, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
LONGEST = 200


class Carts(NamedTuple):
    """Carts with poles, after Barto, Sutton and Anderson (1983).

    Attributes:
        state: float32[n, 4]: position in m, speed in m/s, angle in rad, its speed in rad/s.
        age: int32[n], the steps since the pole was upright.
    """

    state: jax.Array
    age: jax.Array


class Trials(NamedTuple):
    """What was seen and done: arrays whose first axes are steps and carts."""

    observed: jax.Array
    action: jax.Array
    log_probability: jax.Array
    advantage: jax.Array
    returned: jax.Array


def upright(key: jax.Array, count: int) -> Carts:
    """Returns carts whose poles are close to upright."""
    state = jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)
    return Carts(state, jnp.zeros(count, jnp.int32))


def pushed(carts: Carts, right: jax.Array) -> tuple[Carts, jax.Array]:
    """Returns the carts 0.02 s after pushes of 10 N, and which of their poles have fallen."""
    _, speed, angle, spin = carts.state.T
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    force = jnp.where(right, 10.0, -10.0)
    push = (force + 0.05 * spin**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    change = jnp.stack([speed, push - 0.05 * turn * cosine / 1.1, spin, turn], axis=-1)
    state = carts.state + 0.02 * change
    fallen = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095)
    return Carts(state, carts.age + 1), fallen


def again(carts: Carts, ended: jax.Array, key: jax.Array) -> Carts:
    """Returns the carts, with new ones for those that have ended."""
    new = upright(key, len(ended))
    state = jnp.where(ended[:, None], new.state, carts.state)
    return Carts(state, jnp.where(ended, new.age, carts.age))


def ppo(dtype: Any, actors: int = 16, horizon: int = 64, epochs: int = 4) -> Program:
    """PPO with a policy and a value network; the carts move in what the loss is computed in."""

    def logits(params: Tree, observed: jax.Array) -> jax.Array:
        return mlp(params["policy"], observed, dtype, jnp.tanh).astype(jnp.float32)

    def value(params: Tree, observed: jax.Array) -> jax.Array:
        return mlp(params["value"], observed, dtype, jnp.tanh)[..., 0].astype(jnp.float32)

    def tried(params: Tree, carts: Carts, key: jax.Array) -> tuple[Carts, Trials]:
        """Returns carts and what they saw, with advantages by Schulman et al. (2016)."""

        def act(carts: Carts, key: jax.Array) -> tuple[Carts, Tree]:
            choice, renewal = jax.random.split(key)
            log_probabilities = jax.nn.log_softmax(logits(params, carts.state))
            action = jax.random.categorical(choice, log_probabilities)
            moved, fallen = pushed(carts, action == 1)
            ended = fallen | (moved.age >= LONGEST)
            taken = jnp.take_along_axis(log_probabilities, action[:, None], axis=-1)[:, 0]
            kept = carts.state, action, taken, value(params, carts.state), ended
            return again(moved, ended, renewal), kept

        carts, seen = jax.lax.scan(act, carts, jax.random.split(key, horizon))
        observed, action, log_probability, values, ended = seen
        going = 1 - ended.astype(jnp.float32)
        following = jnp.concatenate([values[1:], value(params, carts.state)[None]])
        surprise = 1 + DISCOUNT * going * following - values

        def back(later: jax.Array, step: Tree) -> tuple[jax.Array, jax.Array]:
            advantage = step[0] + DISCOUNT * SMOOTHING * step[1] * later
            return advantage, advantage

        start = jnp.zeros_like(values[0])
        _, advantage = jax.lax.scan(back, start, (surprise, going), reverse=True)
        return carts, Trials(observed, action, log_probability, advantage, advantage + values)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        first, second, third = jax.random.split(key, 3)
        params = {
            "policy": mlp_params(first, (4, 32, 32, 2)),
            "value": mlp_params(second, (4, 32, 32, 1)),
        }
        state = 0, *tried(params, upright(third, actors), third)
        return params, jax.tree.map(jnp.asarray, state)

    def loss(params: Tree, state: Tree, key: jax.Array) -> tuple[jax.Array, Tree]:
        """The loss of one epoch; the trials of the state are replaced after `epochs` of them."""
        step, *before = state
        after = tried(jax.lax.stop_gradient(params), before[0], key)
        used_up = step % epochs == 0
        choose = lambda new, old: jnp.where(used_up, new, old)
        carts, trials = jax.tree.map(choose, after, tuple(before))
        all_logs = jax.nn.log_softmax(logits(params, trials.observed))
        logs = jnp.take_along_axis(all_logs, trials.action[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(logs - trials.log_probability)
        advantage = trials.advantage - jnp.mean(trials.advantage)
        advantage /= jnp.std(trials.advantage) + 1e-6
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        gain = jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
        missed = jnp.mean((value(params, trials.observed) - trials.returned) ** 2)
        entropy = -jnp.mean(jnp.sum(jnp.exp(all_logs) * all_logs, axis=-1))
        return 0.01 * missed - gain - ENTROPY * entropy, (step + 1, carts, trials)

    def score(params: Tree, state: Tree, key: jax.Array) -> jax.Array:
        """The share of the longest time that poles are down, under the likeliest actions."""

        def act(carry: Tree, _: None) -> tuple[Tree, jax.Array]:
            carts, down = carry
            moved, fallen = pushed(carts, jnp.argmax(logits(params, carts.state), axis=-1) == 1)
            return (moved, down | fallen), jnp.mean((down | fallen).astype(jnp.float32))

        carry = upright(key, 64), jnp.zeros(64, bool)
        return jnp.mean(jax.lax.scan(act, carry, None, length=LONGEST)[1])

    return Program(init, lambda key: key, loss, score)
