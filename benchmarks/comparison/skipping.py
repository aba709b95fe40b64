"""Optimizer steps on gradients that are there already: each library's way to skip a bad one."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from jmp_autocast import dynamic_loss_scaling

Tree = Any
Step = Callable[[Tree, Any, Tree], tuple[Tree, Any]]
Optimizer = tuple[Callable[[Tree], Any], Step]
"""``init(params) -> state`` and ``step(params, state, grads) -> (params, state)``."""

SCALE = 2.0**16
"""What the gradients are multiplied by."""


def with_optax(tx: optax.GradientTransformation) -> Optimizer:
    """The step of an optax transformation."""

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def with_ours(tx: optax.GradientTransformation) -> Optimizer:
    """`dynamic_loss_scaling` around the optimizer."""
    return with_optax(dynamic_loss_scaling(tx, init_scale=SCALE))


def with_flax(tx: optax.GradientTransformation) -> Optimizer:
    """`DynamicScale` as Flax's documentation uses it: `jnp.where` on parameters and state."""

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        scale, old = state

        # DynamicScale differentiates by itself: a function whose gradients are the given ones.
        def linear(params: Tree) -> jax.Array:
            products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, grads)
            return sum(jax.tree.leaves(products), start=jnp.float32(0)) / SCALE

        scale, finite, _, true_grads = scale.value_and_grad(linear)(params)
        updates, new = tx.update(true_grads, old, params)
        select = functools.partial(jnp.where, finite)
        new_params = jax.tree.map(select, optax.apply_updates(params, updates), params)
        return new_params, (scale, jax.tree.map(select, new, old))

    def init(params: Tree) -> Any:
        return DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(SCALE)), tx.init(params)

    return init, step


def with_jmp(tx: optax.GradientTransformation) -> Optimizer:
    """`DynamicLossScale` and `select_tree`, as in the documentation of jmp."""
    import jmp

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        # A DynamicLossScale cannot be an argument of a lowered program: the state has its fields.
        (factor, counter), old = state
        scale = jmp.DynamicLossScale(factor, counter)
        true_grads = scale.unscale(grads)
        finite = jmp.all_finite(true_grads)
        updates, new = tx.update(true_grads, old, params)
        moved = optax.apply_updates(params, updates)
        params, new = jmp.select_tree(finite, (moved, new), (params, old))
        scale = scale.adjust(finite)
        return params, ((scale.loss_scale, scale.counter), new)

    def init(params: Tree) -> Any:
        return (jnp.float32(SCALE), jnp.int32(0)), tx.init(params)

    return init, step


def with_apply_if_finite(tx: optax.GradientTransformation) -> Optimizer:
    """`optax.apply_if_finite`, which knows no scale."""
    return with_optax(optax.apply_if_finite(tx, 10))


OURS = "dynamic_loss_scaling"
WAYS: dict[str, Callable[[optax.GradientTransformation], Optimizer]] = {
    "flax DynamicScale": with_flax,
    "jmp DynamicLossScale": with_jmp,
    "optax.apply_if_finite": with_apply_if_finite,
    OURS: with_ours,
}
"""Each way around an optimizer. A machine with a GPU may have no jmp, and then no row of it."""
if importlib.util.find_spec("jmp") is None:
    del WAYS["jmp DynamicLossScale"]
