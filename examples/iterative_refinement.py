"""Solves a system of equations in float64 to the last digit, with its products in float32.

Conjugate gradients in float32 stop where float32 ends. Iterative refinement goes on: what is left
of the right side is computed in float64, the correction for it in float32, and so again until
nothing is left. The program below is written in float64; ``autocast`` with a compute dtype of
float32 brings its products down, and ``full_precision`` keeps the one that has to stay. Run it
with::

    python examples/iterative_refinement.py
    python examples/iterative_refinement.py --size 1000 --condition 1000 --output run

It prints, for float64, for float32 and for the two together, the error of the solution, and the
share of the arithmetic of matrix products that is in float32. It draws what is left after each
round.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runs import COLORS, add_numbers, add_output, folder_of, progress_bar

from jmp_autocast import Policy, autocast, full_precision, op_stats

NUMBERS = {
    "size": (400, "how many unknowns"),
    "condition": (100, "the condition number of the matrix"),
    "rounds": (10, "how often the solution is corrected"),
    "steps": (25, "steps of conjugate gradients in each round"),
}
MIXED = Policy("float32")


# --- the program: it knows of no float32 -----------------------------------------------------


def conjugate_gradients(matrix: jax.Array, right: jax.Array, steps: int) -> jax.Array:
    """Returns an approximate solution of ``matrix @ x = right``.

    Args:
        matrix: Symmetric and positive definite, of shape (n, n).
        right: The right side, of shape (n,).
        steps: The number of products with the matrix.
    """

    def step(state: Any, _: None) -> tuple[Any, None]:
        x, residual, direction, norm = state
        along = matrix @ direction
        rate = norm / jnp.dot(direction, along)
        residual = residual - rate * along
        new = jnp.dot(residual, residual)
        return (x + rate * direction, residual, residual + new / norm * direction, new), None

    start = jnp.zeros_like(right), right, right, jnp.dot(right, right)
    return lax.scan(step, start, None, length=steps)[0][0]


def refined(
    matrix: jax.Array, right: jax.Array, rounds: int, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Returns a solution, and the norm of what was left before each round.

    Args:
        matrix: As for `conjugate_gradients`.
        right: As for `conjugate_gradients`.
        rounds: How often the solution is corrected.
        steps: As for `conjugate_gradients`.
    """

    def correct(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        # A difference of two nearly equal vectors: the product in it needs all of its digits.
        with full_precision():
            residual = right - matrix @ x
        return x + conjugate_gradients(matrix, residual, steps), jnp.linalg.norm(residual)

    return lax.scan(correct, jnp.zeros_like(right), None, length=rounds)


# --- the measurement -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """What one way of solving came to.

    Attributes:
        name: How it computed.
        error: The relative error of the solution.
        left: What was left of the right side before each round, relative to it.
        low_flops: The share of the arithmetic of matrix products in float32.
    """

    name: str
    error: float
    left: np.ndarray
    low_flops: float


def system(size: int, condition: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a matrix, a solution and its right side, in float64.

    Args:
        size: The number of unknowns.
        condition: The largest eigenvalue of the matrix over the smallest.
        seed: Of the random numbers.
    """
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.standard_normal((size, size)))
    matrix = (basis * np.geomspace(1, condition, size)) @ basis.T
    matrix = (matrix + matrix.T) / 2
    solution = random.standard_normal(size)
    return matrix, solution, matrix @ solution


def measure(
    name: str, solve: Callable[..., Any], dtype: str, options: argparse.Namespace
) -> Result:
    """Solves one system.

    Args:
        name: How ``solve`` computes.
        solve: From a matrix and a right side to a solution and what was left.
        dtype: What the two are cast to before.
        options: The options of the command line.
    """
    matrix, solution, right = system(options.size, options.condition)
    given = jnp.asarray(matrix, dtype), jnp.asarray(right, dtype)
    found, left = jax.device_get(jax.jit(solve)(*given))
    products = [count for count in op_stats(solve, *given) if count.primitive == "dot_general"]
    low = sum(count.flops for count in products if count.operands == ("float32",))
    error = np.linalg.norm(found.astype(np.float64) - solution) / np.linalg.norm(solution)
    flops = sum(count.flops for count in products)
    return Result(name, float(error), left / left[0], low / flops)


def draw(results: Sequence[Result], path: Any) -> None:
    """Draws what is left after each round."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colors = {"float64": COLORS["float16"], "float32": COLORS["float32"]}
    for result in results:
        color = colors.get(result.name, COLORS["bfloat16"])
        axes.semilogy(result.left, marker="o", label=result.name, color=color)
    axes.set(xlabel="round", ylabel="what is left, relative", title="Iterative refinement")
    axes.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Solves a system in three ways, prints a table and draws what is left.

    Args:
        argv: The command line, ``sys.argv`` by default.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(parser, NUMBERS)
    add_output(parser)
    options = parser.parse_args(argv)
    console = Console()

    def solve(matrix: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
        return refined(matrix, right, options.rounds, options.steps)

    ways = {
        "float64": (solve, "float64"),
        "float32": (solve, "float32"),
        "products in float32": (autocast(solve, policy=MIXED, params=()), "float64"),
    }
    results = []
    with jax.enable_x64(True), progress_bar(console) as progress:
        task = progress.add_task("solve", total=len(ways))
        for name, (fn, dtype) in ways.items():
            results.append(measure(name, fn, dtype, options))
            progress.advance(task)
    table = Table(title=f"{options.size} equations, condition {options.condition}")
    for name in ("", "error of the solution", "products in float32"):
        table.add_column(name, justify="left" if not name else "right")
    for result in results:
        table.add_row(result.name, f"{result.error:.1e}", f"{100 * result.low_flops:.1f} %")
    console.print(table)
    folder = folder_of(options, "iterative_refinement")
    draw(results, folder / "refinement.png")
    console.print(f"What is left after each round: {folder / 'refinement.png'}")
    return results


if __name__ == "__main__":
    main()
