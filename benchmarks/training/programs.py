"""What a model is to the training loop, and the ways to compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_autocast import autocast

Tree = Any
Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]


def unchanged(fn: Any) -> Any:
    """Returns a function as it is."""
    return fn


class Precision(NamedTuple):
    """A way to compute a model.

    Attributes:
        name: What it is called in tables.
        dtype: What layers compute in where it is written by hand; None for a model without any
            precision of its own.
        cast: Applied to loss and score.
        scaled: The loss is scaled dynamically.
        by_default: It is trained where no precisions are named.
    """

    name: str
    dtype: Any = None
    cast: Callable[[Any], Any] = unchanged
    scaled: bool = False
    by_default: bool = True


def ours(dtype: Any) -> Callable[[Any], Any]:
    """Returns autocast into a dtype, all else by default."""
    return lambda fn: autocast(fn, dtype)


FLOAT32 = Precision("float32")
PRECISIONS = (
    FLOAT32,
    Precision("by hand, bfloat16", jnp.bfloat16),
    Precision("ours, bfloat16", cast=ours(jnp.bfloat16)),
    Precision("by hand, float16", jnp.float16, scaled=True, by_default=False),
    Precision("ours, float16", cast=ours(jnp.float16), scaled=True),
)


class Program(NamedTuple):
    """A model, its data and its loss, with a compute dtype threaded through by hand or none.

    Attributes:
        init: From a key to the parameters and a state that is no parameter (statistics, or ()).
        batch: From a key to a batch, its noise included.
        loss: From parameters, state and batch to a float32 scalar and the next state.
        score: From parameters, state and a last batch to a float32 scalar, the lower the better;
            None for the mean loss of the last tenth of the steps.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    batch: Callable[[jax.Array], Tree]
    loss: Loss
    score: Callable[[Tree, Tree, Tree], jax.Array] | None = None


class Task(NamedTuple):
    """A row of the table.

    Attributes:
        name: What it is called.
        make: From the compute dtype of hand-written layers, or None, to the program.
        steps: Gradient steps.
        rate: The highest learning rate.
        measure: What the score is.
        together: The seeds are computed as one batch; else one after the other, which is faster for
            convolutions.
    """

    name: str
    make: Callable[[Any], Program]
    steps: int
    rate: float
    measure: str = "training loss"
    together: bool = True


def plain(
    init: Callable[[jax.Array], Tree],
    batch: Callable[[jax.Array], Tree],
    loss: Callable[[Tree, Tree], jax.Array],
    score: Callable[[Tree, Tree], jax.Array] | None = None,
) -> Program:
    """Returns the program of a model without a state."""

    def loss_of(params: Tree, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        return loss(params, batch), state

    def score_of(params: Tree, state: Tree, batch: Tree) -> jax.Array:
        return score(params, batch)

    return Program(lambda key: (init(key), ()), batch, loss_of, None if score is None else score_of)
