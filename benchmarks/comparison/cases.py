"""A case: a model, its size, and the batches and parameters that it is measured with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .models import Gpt, Lstm, ResNet, Vit

Tree = Any
Loss = Callable[[Tree, Tree], tuple[jax.Array, Tree]]

GROUPS = {
    "kernel": "kernels",
    "bias": "biases",
    "scale": "scales",
    "embedding": "embeddings",
    "pos_embedding": "embeddings",
    "cls_embedding": "embeddings",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its size.

    Args:
        name: Its name in the tables.
        model: The module class.
        sizes: Its size arguments.
        inputs: The shape of a batch: (batch, positions), or (batch, height, width, channels).
        labels: The number of classes or tokens.
    """

    name: str
    model: type[nn.Module]
    sizes: Mapping[str, Any]
    inputs: tuple[int, ...]
    labels: int

    def __str__(self) -> str:
        sizes = ", ".join(f"{key} {value}" for key, value in self.sizes.items())
        return f"{self.name}: {sizes}, input {self.inputs}"

    def build(self, dtype: Any = None, param_dtype: Any = jnp.float32) -> nn.Module:
        """Returns the module with a compute dtype; None leaves it to the parameters."""
        return self.model(dtype=dtype, param_dtype=param_dtype, **self.sizes)

    def examples(self, count: int) -> list[tuple[Tree, Tree]]:
        """Returns pairs of float32 parameters and batch, as numpy arrays, each of its own seed."""
        init = jax.jit(self.build().init)
        return [self._example(init, seed) for seed in range(count)]

    def _example(self, init: Callable[..., Any], seed: int) -> tuple[Tree, Tree]:
        rng = np.random.default_rng(seed)
        if len(self.inputs) == 2:
            tokens = rng.integers(0, self.labels, (self.inputs[0], self.inputs[1] + 1))
            inputs, labels = tokens[:, :-1].astype(np.int32), tokens[:, 1:]
        else:
            inputs = rng.standard_normal(self.inputs, np.float32)
            labels = rng.integers(0, self.labels, self.inputs[0])
        state = jax.tree.map(np.asarray, dict(init(jax.random.key(seed), inputs)))
        params = state.pop("params")

        def move(path: Any, x: np.ndarray) -> np.ndarray:
            # Where biases are 0 and scales 1, errors would hide.
            size = {"biases": 0.1, "scales": 0.2}.get(group_of(path), 0.0)
            return x + np.float32(size) * rng.standard_normal(x.shape, np.float32)

        batch = {"inputs": inputs, "labels": labels.astype(np.int32), "state": state}
        return jax.tree_util.tree_map_with_path(move, params), batch


def group_of(path: Any) -> str:
    """Returns the group of a parameter: kernels, biases, scales or embeddings."""
    return GROUPS.get(path[-1].key, "kernels")


def forward(model: nn.Module, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Returns the logits and the new state (the running statistics of norms)."""
    variables = {"params": params, **batch["state"]}
    return model.apply(variables, batch["inputs"], mutable=[*batch["state"]])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy, in the dtype of the logits."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(chosen)


def plain_loss(model: nn.Module) -> Loss:
    """Returns a loss that says nothing about precision."""

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        logits, state = forward(model, params, batch)
        return cross_entropy(logits, batch["labels"]), state

    return loss


SIZES = {
    "tiny": (
        Case("GPT", Gpt, {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64}, (2, 16), 64),
        Case("ViT", Vit, {"layers": 1, "width": 32, "heads": 2}, (8, 16, 16, 3), 100),
        Case("ResNet", ResNet, {"stages": (1, 1), "width": 8}, (8, 16, 16, 3), 100),
        Case("LSTM", Lstm, {"layers": 1, "width": 32, "vocabulary": 64}, (8, 8), 64),
    ),
    "quick": (
        Case("GPT", Gpt, {"layers": 1, "width": 128, "vocabulary": 1000}, (2, 128), 1000),
        Case("ViT", Vit, {"layers": 1, "width": 128}, (4, 32, 32, 3), 100),
        Case("ResNet", ResNet, {"stages": (1, 1), "width": 16}, (8, 32, 32, 3), 100),
        Case("LSTM", Lstm, {"layers": 1, "width": 128, "vocabulary": 1000}, (4, 64), 1000),
    ),
    "full": (
        Case("GPT", Gpt, {"layers": 12, "width": 128, "vocabulary": 1000}, (4, 128), 1000),
        Case("ViT", Vit, {"layers": 6, "width": 128}, (8, 32, 32, 3), 100),
        Case("ResNet", ResNet, {"stages": (2, 2, 2, 2), "width": 16}, (16, 32, 32, 3), 100),
        Case("LSTM", Lstm, {"layers": 2, "width": 128, "vocabulary": 1000}, (8, 128), 1000),
    ),
    "large": (
        Case(
            "GPT",
            Gpt,
            {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32000},
            (8, 1024),
            32000,
        ),
        Case(
            "ViT",
            Vit,
            {"layers": 12, "width": 768, "heads": 12, "patch": 16, "classes": 1000},
            (64, 224, 224, 3),
            1000,
        ),
        Case(
            "ResNet",
            ResNet,
            {"stages": (3, 4, 6, 3), "width": 64, "classes": 1000},
            (128, 64, 64, 3),
            1000,
        ),
        Case("LSTM", Lstm, {"layers": 2, "width": 1024, "vocabulary": 32000}, (32, 256), 32000),
    ),
}
"""Each size has the four models. On a CPU: tiny, quick and full; large is for a GPU."""
