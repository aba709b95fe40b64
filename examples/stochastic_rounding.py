"""Rounds one cast of a program stochastically, by a rule that emits a function of its own.

Weights in bfloat16 have three digits: an update below half of the last one is lost when the sum is
rounded to the nearest number, each time anew. Rounding up or down at random, with the probability
of the distance, is right in the mean. The program below says nothing of it: it casts, in a named
scope, and the rule replaces that one cast. Run it with::

    python examples/stochastic_rounding.py
    python examples/stochastic_rounding.py --steps 2000 --output run

It prints, for weights that are stored in float32, in bfloat16 to the nearest, and in bfloat16 at
random, how far they are after many small updates from where they should be, in the mean and by
themselves, and the derivative of a stored weight with respect to its update. It draws the way of
their mean and the errors at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runs import COLORS, add_numbers, add_output, folder_of, progress_bar

from jmp_autocast import BF16, Decision, EquationView, autocast

START, UPDATE = 1.0, 1e-4  # bfloat16 has 1.0 and 1.0078125, and nothing between them
NUMBERS = {
    "steps": (1000, "how many updates"),
    "weights": (4096, "how many weights"),
}


# --- the program: it knows of no stochastic rounding ----------------------------------------


def update_weights(stored: jax.Array, update: jax.Array) -> jax.Array:
    """Returns the weights after an update, in the dtype in which they are stored.

    Args:
        stored: The weights, of shape (n,), in float32 or bfloat16.
        update: What is added to them, of shape (n,), in float32.
    """
    full = stored.astype(jnp.float32) + update
    with jax.named_scope("store"):
        return full.astype(stored.dtype)


# --- the rule -------------------------------------------------------------------------------


@jax.custom_jvp
def round_stochastically(x: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two bfloat16 beside it; the mean over many elements is exact.

    The result is a function of ``x`` alone: no key has to be handed in, and a step that is run
    again gives the same bits. Elements of one array get different random bits.

    Args:
        x: An array of any shape, in float32.

    Returns:
        An array of the same shape, in bfloat16.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # The odd factors differ between elements, so that swapped elements give another key.
    places = lax.iota(jnp.uint32, x.size).reshape(x.shape) * 2 + 1
    key = jax.random.key(jnp.sum(bits * places, dtype=jnp.uint32))
    # bfloat16 is the upper half of a float32. A random number below 2**16 carries into that half
    # with probability (lower half) / 2**16.
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = lax.bitcast_convert_type((bits + noise) & np.uint32(0xFFFF0000), jnp.float32)
    # The sum would carry the bits of a NaN into its sign.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


@round_stochastically.defjvp
def _straight_through(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Differentiates as the cast does: the tangent is the operand's, rounded to the nearest."""
    return round_stochastically(*primals), tangents[0].astype(jnp.bfloat16)


def store_rule(eqn: EquationView) -> Decision | None:
    """Replaces casts from float32 to bfloat16 in a scope ``store``; leaves all others."""
    narrows = (eqn.operand_dtypes[0], eqn.result_dtypes[0]) == (jnp.float32, jnp.bfloat16)
    in_scope = "store" in eqn.scope.split("/")
    return Decision(emit=round_stochastically) if narrows and in_scope else None


NEAREST = BF16
STOCHASTIC = BF16.with_rules({"convert_element_type": store_rule})


# --- comparison -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """What many updates came to.

    Attributes:
        name: How the weights are stored.
        means: The mean of the weights after each step, less that of the exact weights.
        errors: What each weight is at the end, less what it should be, of shape (n,).
        derivative: The derivative of the sum of the stored weights with respect to one update.
    """

    name: str
    means: list[float]
    errors: np.ndarray
    derivative: float


def run(
    name: str,
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    options: argparse.Namespace,
    on_step: Callable[[], None],
) -> Result:
    """Updates weights many times with a function, and compares with sums in float64."""
    dtype = jnp.float32 if name == "float32" else jnp.bfloat16
    stored = jnp.full(options.weights, START, dtype)
    exact = np.full(options.weights, START)
    step, rng, means = jax.jit(fn), np.random.default_rng(options.seed), []
    for _ in range(options.steps):
        update = rng.uniform(0, 2 * UPDATE, options.weights).astype(np.float32)
        stored, exact = step(stored, update), exact + update
        means.append(float(np.mean(np.asarray(stored, np.float64) - exact)))
        on_step()
    slope = jax.grad(lambda update: fn(stored, update).astype(jnp.float32).sum())(update)
    return Result(name, means, np.asarray(stored, np.float64) - exact, float(slope.mean()))


def show(results: Sequence[Result], options: argparse.Namespace, console: Console) -> None:
    """Prints the errors of all runs as a table."""
    table = Table(title=f"{options.steps} updates of about {UPDATE:g} to weights of {START:g}")
    table.add_column("stored", vertical="bottom")
    for name in ("mean error", "error of one\nweight (RMS)", "derivative"):
        table.add_column(name, justify="right")
    for result in results:
        rms = np.sqrt(np.mean(result.errors**2))
        mean = f"{result.errors.mean():+.2e}"
        table.add_row(result.name, mean, f"{rms:.2e}", f"{result.derivative:g}")
    console.print(table)


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Draws the mean error after each step, and the errors of the weights at the end."""
    colors = dict(zip((r.name for r in results), COLORS.values(), strict=True))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result in results:
        left.plot(result.means, label=result.name, color=colors[result.name])
        if result.name != "float32":  # a line of no width
            right.hist(result.errors, bins=60, color=colors[result.name], alpha=0.6)
    left.set(xlabel="update", ylabel="mean error")
    left.legend(frameon=False)
    right.set(xlabel="error of a weight at the end", ylabel="weights", yscale="log")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Runs the three ways of storing weights as the command line asks for; returns the results.

    Args:
        argv: The arguments, None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(parser, NUMBERS)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_output(parser)
    options, console = parser.parse_args(argv), Console()
    ways = {
        "float32": update_weights,
        "bfloat16, to the nearest": autocast(update_weights, policy=NEAREST),
        "bfloat16, at random": autocast(update_weights, policy=STOCHASTIC),
    }
    results = []
    with progress_bar(console) as progress:
        for name, fn in ways.items():
            task = progress.add_task(name, total=options.steps)
            results.append(run(name, fn, options, lambda task=task: progress.advance(task)))
    show(results, options, console)
    picture = folder_of(options, "stochastic_rounding") / "rounding.png"
    draw(results, picture)
    console.print(f"Picture: {picture}", soft_wrap=True)
    return results


if __name__ == "__main__":
    main()
