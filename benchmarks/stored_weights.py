"""Trains a small GPT with weights in 16 bits, and compares loss and bytes.

    python benchmarks/stored_weights.py [--seeds 5] [--steps 1000] [--width 64] [--layers 2]

Each recipe trains the same models on the same characters, the documentation that Python brings
along. All seeds of a recipe run as one program. The table gives the bytes of parameters and
optimizer state per parameter, from the arrays after the run; the mean loss of the last tenth of the
steps; and its distance to that of float32 weights, for the mean and for the seed that is furthest.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison.models import Gpt
from comparison.tables import as_markdown

from jmp_autocast import BF16, autocast, cast_params
from jmp_autocast.optimizers import (
    as_float32,
    float32_params,
    kahan_summation,
    master_weights,
    start_from,
    stochastic_rounding,
)

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


def alone(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer as it is."""
    return tx


class Recipe(NamedTuple):
    """How weights are stored.

    Attributes:
        stored: Whether weights are stored as `cast_params` casts them; else in float32.
        wrap: From the optimizer to what trains the weights.
    """

    stored: bool
    wrap: Wrap


RECIPES = {
    "float32 weights": Recipe(False, alone),
    "bfloat16 weights, optax alone": Recipe(True, alone),
    "master weights": Recipe(True, master_weights),
    "Kahan summation": Recipe(True, kahan_summation),
    "stochastic rounding": Recipe(True, stochastic_rounding),
}


class Result(NamedTuple):
    """What a recipe gives.

    Attributes:
        losses: float32[seeds, steps].
        nbytes: Bytes of parameters and optimizer state per parameter.
        weights: The parameters after the last step, in float32.
        seconds: The time of the run, with compilation.
    """

    losses: np.ndarray
    nbytes: float
    weights: Any
    seconds: float


def windows(options: argparse.Namespace) -> np.ndarray:
    """Returns the characters of all steps: int32[seeds, steps, batch, context + 1]."""
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    rng = np.random.default_rng(0)
    shape = options.seeds, options.steps, options.batch
    starts = rng.integers(0, len(text) - options.context - 1, shape)
    return np.frombuffer(text, np.uint8)[starts[..., None] + np.arange(options.context + 1)]


def train(recipe: Recipe, options: argparse.Namespace) -> Result:
    """Trains all seeds of a recipe."""
    model = Gpt(
        layers=options.layers, width=options.width, heads=4, vocabulary=128
    )  # characters of ASCII

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss = autocast(loss_fn, policy=BF16)
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    tx = recipe.wrap(optax.adamw(schedule, b2=options.b2))

    def run(seed: jax.Array, text: jax.Array) -> Any:
        text = text.astype(jnp.int32)
        variables: Any = model.init(jax.random.key(seed), text[0, :, :-1])
        wide = variables["params"]
        params = cast_params(loss, wide, text[0]) if recipe.stored else wide
        state = start_from(tx.init(params), params, wide)

        def step(carry: Any, tokens: jax.Array) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(as_float32(params), tokens)
            if recipe.wrap is alone:  # optax wants gradients in the dtypes of the weights
                grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, state), text)

    start = time.perf_counter()
    seeds = jnp.arange(options.seeds)
    (params, state), losses = jax.block_until_ready(jax.jit(jax.vmap(run))(seeds, windows(options)))
    seconds = time.perf_counter() - start
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state))) / count
    try:
        weights = float32_params(state, params)
    except ValueError:  # a recipe that keeps nothing beside the weights
        weights = as_float32(params)
    return Result(np.asarray(losses), nbytes, weights, seconds)


def rows(found: dict[str, Result]) -> list[list[str]]:
    """Returns the table."""
    table = [["recipe", "bytes per parameter", "final loss", "mean", "furthest seed", "seconds"]]
    last = {name: result.losses[:, -(result.losses.shape[1] // 10) :].mean(1) for name, result in
            found.items()}  # fmt: skip
    first = last["float32 weights"]
    for name, result in found.items():
        mean = last[name].mean() / first.mean() - 1
        furthest = max(last[name] / first - 1, key=abs)
        table.append(
            [name, f"{result.nbytes:.2f}", f"{last[name].mean():.4f}", f"{100 * mean:+.2f} %",
             f"{100 * furthest:+.2f} %", f"{result.seconds:.0f}"]
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> dict[str, Result]:
    """Runs the recipes, prints the table, and returns what they gave."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    for name, value in {"seeds": 5, "steps": 1000, "batch": 16, "context": 64, "width": 64,
                        "layers": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of AdamW")
    parser.add_argument("--b2", type=float, default=0.999, help="decay of the second moment")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    options = parser.parse_args(arguments)
    names = dict.fromkeys(["float32 weights", *options.recipes])
    found = {name: train(RECIPES[name], options) for name in names}
    print(as_markdown(rows(found)))
    if "master weights" in found:
        pairs = zip(*(jax.tree.leaves(found[name].weights) for name in ("float32 weights",
                    "master weights")), strict=True)  # fmt: skip
        print("master weights have the bits of float32 weights:",
              all(bool((a == b).all()) for a, b in pairs))  # fmt: skip
    return found


if __name__ == "__main__":
    main()
