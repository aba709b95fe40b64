"""One optimizer step on gradients that are there already, with each way to skip a bad one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from comparison.cases import Tree
from flax.training.dynamic_scale import DynamicScale

from jmp_autocast import dynamic_loss_scaling

from .programs import CASES, QUICK_CASES, Program, on_device, shapes_of

SCALE = 2.0**16
Step = Callable[[Tree, Any, Tree], tuple[Tree, Any]]
Optimizer = tuple[Callable[[Tree], Any], Step]


def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), adamw())


def scaled(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return dynamic_loss_scaling(inner, init_scale=SCALE)


def of(tx: optax.GradientTransformation) -> Optimizer:
    """Returns the step of an optax transformation."""

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def with_flax() -> Optimizer:
    """`DynamicScale` as Flax's documentation uses it: `jnp.where` on parameters and state."""
    tx = adamw()

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


def with_jmp() -> Optimizer:
    """`DynamicLossScale` and `select_tree`, as in the documentation of jmp."""
    tx = adamw()

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


ADAMW, CLIPPED = "adamw", "clip + adamw"
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    ADAMW: lambda: of(adamw()),
    "dynamic_loss_scaling(adamw)": lambda: of(scaled(adamw())),
    "flax DynamicScale": with_flax,
    "jmp DynamicLossScale": with_jmp,
    "optax.apply_if_finite": lambda: of(optax.apply_if_finite(adamw(), 10)),
    CLIPPED: lambda: of(clipped()),
    "dynamic_loss_scaling(clip + adamw)": lambda: of(scaled(clipped())),
}
"""The rows, in order. Those that name clip are compared with `CLIPPED`, the others with `ADAMW`."""


def base_of(name: str) -> str:
    """Returns the row that another one's ratios are to."""
    return CLIPPED if CLIPPED in name else ADAMW


def optimizer_program(name: str, device: Any, *, quick: bool, unrolled: bool) -> Program:
    """Returns an optimizer step on the parameters of a GPT, 124M of them, or 2M.

    Args:
        name: One of `OPTIMIZERS`.
        device: Where it runs.
        quick: Whether the parameters are those of the small GPT.
        unrolled: Whether each layer has its own arrays: 148 arrays and not 18.
    """
    case = (QUICK_CASES if quick else CASES)["gpt_scan"]
    if unrolled:
        case = case.__class__(**vars(case) | {"sizes": {**case.sizes, "scan": False}})
    params, _ = shapes_of(case)
    init, step = OPTIMIZERS[name]()
    arguments = (params, jax.eval_shape(init, params), params)
    return Program(step, on_device(arguments, device))
