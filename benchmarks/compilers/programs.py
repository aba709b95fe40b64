"""Programs to compile: training steps of models, and their arguments as shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from comparison.cases import Case, Loss, Tree
from comparison.models import Lstm, Vit
from comparison.variants import BASE, VARIANTS
from jax.sharding import SingleDeviceSharding

from . import models


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, and the shapes, dtypes and places of its arguments.

    Args:
        function: The function; its first two arguments, parameters and state, are donated.
        arguments: Trees of `jax.ShapeDtypeStruct`, each with a sharding.
        out_shardings: Where the results lie; None leaves it to the compiler.
    """

    function: Callable[..., Any]
    arguments: tuple[Tree, ...]
    out_shardings: Any = None

    def trace(self) -> Any:
        """Returns `jax.jit`'s trace of it, for a new cache entry."""
        options = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        return jax.jit(self.function, donate_argnums=(0, 1), **options).trace(*self.arguments)


_GPT = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257}
_SMALL_GPT = {"layers": 1, "width": 256, "heads": 4, "vocabulary": 2048}
_TOKENS, _SMALL_TOKENS = (8, 1024), (2, 256)


def _gpt(name: str, batch: int = 8, **sizes: Any) -> Case:
    return Case(name, models.Gpt, _GPT | sizes, (batch, 1024), _GPT["vocabulary"])


def _small_gpt(name: str, **sizes: Any) -> Case:
    return Case(name, models.Gpt, _SMALL_GPT | sizes, (2, 256), _SMALL_GPT["vocabulary"])


# Unrolled, the compilers take 10 s to minutes for each layer; each costs what the others cost, so
# three do.
CASES = {
    case.name: case
    for case in (
        _gpt("gpt", layers=3),
        # At 8 x 1024 without remat, 12 layers need 17.7 GB of temporary bytes: more than a v5e has.
        _gpt("gpt_scan", batch=4, scan=True),
        _gpt("gpt_scan_remat", scan=True, remat=True),
        Case("gpt_nnx", models.NnxGpt, _GPT | {"layers": 3}, (8, 1024), _GPT["vocabulary"]),
        Case(
            "vit",
            Vit,
            {"layers": 3, "width": 768, "heads": 12, "patch": 16, "classes": 1000},
            (32, 224, 224, 3),
            1000,
        ),
        Case(
            "resnet",
            models.ResNet50,
            {"stages": (3, 4, 6, 3), "width": 64},
            (64, 224, 224, 3),
            1000,
        ),
        Case("lstm", Lstm, {"layers": 2, "width": 1024, "vocabulary": 32000}, (64, 256), 32000),
    )
}
"""The models in the sizes that their papers give them, at batches that fit a v5e."""

QUICK_CASES = {
    case.name: case
    for case in (
        _small_gpt("gpt"),
        _small_gpt("gpt_scan", scan=True),
        _small_gpt("gpt_scan_remat", scan=True, remat=True),
        Case("gpt_nnx", models.NnxGpt, _SMALL_GPT, (2, 256), 2048),
        Case(
            "vit",
            Vit,
            {"layers": 1, "width": 256, "heads": 4, "patch": 16, "classes": 1000},
            (8, 224, 224, 3),
            1000,
        ),
        Case(
            "resnet",
            models.ResNet50,
            {"stages": (1, 1), "width": 32, "classes": 100},
            (8, 64, 64, 3),
            100,
        ),
        Case("lstm", Lstm, {"layers": 1, "width": 256, "vocabulary": 2048}, (16, 32), 2048),
    )
}
"""The same models, small: they compile in seconds, and their ratios are near those of the large."""


HAND = BASE
LOSSES: dict[str, Callable[[Case, Any], Loss]] = {
    variant.name: variant.make
    for variant in VARIANTS
    if variant.name not in ("naive promote", "ours o1 consumer")
}
"""The ways to mixed precision, in order: each makes a loss of a case and a compute dtype."""
DEFAULTS = tuple(v.name for v in VARIANTS if v.by_default and v.name in LOSSES)
"""Those that are compiled where none are named."""


def training_step(loss: Loss, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns a whole training step: loss, gradients, optimizer, new parameters."""

    def step(params: Tree, opt_state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array, Tree]:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, state

    return step


def shapes_of(case: Case) -> tuple[Tree, Tree]:
    """Returns the shapes of a case's parameters and of its batch; no array is made."""
    tokens = len(case.inputs) == 2
    inputs = jax.ShapeDtypeStruct(case.inputs, jnp.int32 if tokens else jnp.float32)
    state = dict(jax.eval_shape(case.build().init, jax.random.key(0), inputs))
    params = state.pop("params")
    labels = jax.ShapeDtypeStruct(case.inputs if tokens else case.inputs[:1], jnp.int32)
    return params, {"inputs": inputs, "labels": labels, "state": state}


def on_device(tree: Tree, device: Any) -> Tree:
    """Returns shapes as those of arrays on one device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def training_program(case: Case, loss: Loss, device: Any) -> Program:
    """Returns the training step of a case on one device, with adamw."""
    tx = optax.adamw(1e-4)
    params, batch = shapes_of(case)
    arguments = (params, jax.eval_shape(tx.init, params), batch)
    return Program(training_step(loss, tx), on_device(arguments, device))


def with_sizes(cases: Mapping[str, Case], **sizes: Any) -> dict[str, Case]:
    """Returns cases with other sizes, such as ``layers=4``; None changes nothing."""
    given = {name: size for name, size in sizes.items() if size is not None}

    def changed(case: Case) -> Case:
        own = {name: size for name, size in given.items() if name in case.sizes}
        return dataclasses.replace(case, sizes={**case.sizes, **own})

    return {name: changed(case) for name, case in cases.items()}
