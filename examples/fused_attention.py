"""Replaces the attention of a program by JAX's own, by a rule that emits a function of its own.

The program has attention written out: a matmul, a mask, a softmax and a matmul, in a jitted
function named ``attention``. The rule on ``jit`` replaces each call of that function by
`jax.nn.dot_product_attention` on operands in the compute dtype; the rest of the program is cast as
always. Run it with::

    python examples/fused_attention.py
    python examples/fused_attention.py --context 512 --dtype float16 --output run

It prints, for the program in float32, under `autocast`, and under `autocast` with the rule, the
loss, how far the gradients are from those in float32, the equations of the gradient and what is
kept for the backward pass, and draws the last of them and the error of each gradient.

On a GPU that has cuDNN's attention write ``implementation="cudnn"`` in `fused`, and leave
`jax.checkpoint` out: that kernel keeps no scores by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runs import COLORS, add_numbers, add_output, folder_of, progress_bar

from jmp_autocast import BF16, FP16, Decision, EquationView, autocast

POLICIES = {"bfloat16": BF16, "float16": FP16}
NUMBERS = {
    "layers": (2, "how many layers"),
    "width": (128, "features per position"),
    "heads": (4, "attention heads"),
    "context": (256, "positions"),
    "batch-size": (4, "sequences"),
}

Params = dict[str, jax.Array]


# --- the program: it knows of no fused attention, and of no mixed precision -----------------


@jax.jit
def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Returns causal attention; all arrays have shape (batch, positions, heads, features)."""
    scores = jnp.einsum("bqhf,bkhf->bhqk", query, key) / np.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    return jnp.einsum("bhqk,bkhf->bqhf", weights, value)


def make_loss(heads: int) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Returns the loss of a stack of attention layers, for parameters as `make_params` makes."""

    def loss(params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        for qkv, out in zip(params["qkv"], params["out"], strict=True):
            split = jnp.split(x @ qkv, 3, axis=-1)
            q, k, v = (y.reshape(*y.shape[:-1], heads, -1) for y in split)
            x = x + attention(q, k, v).reshape(x.shape) @ out
        return jnp.mean((x - target) ** 2)

    return loss


def make_params(key: jax.Array, layers: int, width: int) -> Params:
    """Returns the weights of all layers, stacked: of shape (layers, width, 3 width or width)."""
    first, second = jax.random.split(key)
    return {
        "qkv": jax.random.normal(first, (layers, width, 3 * width)) / np.sqrt(width),
        "out": jax.random.normal(second, (layers, width, width)) / np.sqrt(width),
    }


# --- the rule -------------------------------------------------------------------------------


@jax.checkpoint
def fused(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Returns causal attention by JAX's function, which adds up in float32.

    For the backward pass query, key and value are kept alone; the scores are computed again.
    """
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def attention_rule(eqn: EquationView) -> Decision | None:
    """Replaces calls of a jitted function named ``attention``; leaves all others."""
    if eqn.function != "attention":
        return None
    # What it reads and returns is in 16 bits: the planner is told so, and casts what it reads.
    dtype = eqn.compute_dtype
    return Decision(emit=fused, operand_dtype=dtype, output_dtype=dtype, name="fused attention")


# --- comparison -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """What one version of the program came to.

    Attributes:
        name: The version.
        loss: The loss.
        errors: For each parameter the error of its gradient, relative to its norm in float32.
        equations: The number of equations of the gradient, those inside of calls included.
        kept: The bytes that are kept for the backward pass, without the parameters.
    """

    name: str
    loss: float
    errors: dict[str, float]
    equations: int
    kept: int


def kept_bytes(fn: Callable[[Params], jax.Array], params: Params) -> int:
    """Returns the bytes of the arrays that the backward pass of a function reads."""
    pullback = jax.eval_shape(lambda params: jax.vjp(fn, params)[1], params)
    arrays = [x for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating)]
    of_params = {shape for x in jax.tree.leaves(params) for shape in (x.shape, x.shape[1:])}
    return sum(x.size * x.dtype.itemsize for x in arrays if x.shape not in of_params)


def count_equations(jaxpr: Any) -> int:
    """Returns the number of equations of a jaxpr, those of jaxprs inside included."""
    inner = [getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in eqn.params.values()]
    return len(jaxpr.eqns) + sum(count_equations(p) for p in inner if hasattr(p, "eqns"))


def measure(
    name: str, loss: Callable[..., jax.Array], arguments: tuple[Params, Any, Any], exact: Params
) -> Result:
    """Runs a version of the program and its gradient, and compares with exact gradients."""
    params, *data = arguments
    gradient = jax.value_and_grad(loss)
    value, grads = jax.jit(gradient)(*arguments)
    errors = {
        key: float(jnp.linalg.norm(grads[key] - exact[key]) / jnp.linalg.norm(exact[key]))
        for key in exact
    }
    equations = count_equations(jax.make_jaxpr(gradient)(*arguments))
    kept = kept_bytes(lambda params: loss(params, *data), params)
    return Result(name, float(value), errors, equations, kept)


def show(results: Sequence[Result], console: Console) -> None:
    """Prints the versions of the program as a table."""
    table = Table(title="Attention, written out and replaced")
    table.add_column("program", vertical="bottom")
    for name in (
        "loss",
        "largest error\nof a gradient",
        "equations",
        "kept for the\nbackward pass",
    ):
        table.add_column(name, justify="right")
    for result in results:
        error, kept = f"{max(result.errors.values()):.2%}", f"{result.kept / 1e6:.2f} MB"
        table.add_row(result.name, f"{result.loss:.5f}", error, str(result.equations), kept)
    console.print(table)


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Draws what is kept for the backward pass, and the error of each gradient."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for k, (result, color) in enumerate(zip(results, COLORS.values(), strict=True)):
        left.barh(result.name, result.kept / 1e6, color=color)
        if k:  # the first is what the others are compared with
            places = np.arange(len(result.errors)) + 0.4 * (k - 1)
            errors = [100 * error for error in result.errors.values()]
            right.bar(places, errors, 0.35, color=color, label=result.name)
    left.set(xlabel="kept for the backward pass, MB")
    left.invert_yaxis()
    right.set(xticks=np.arange(len(results[0].errors)) + 0.2, ylabel="error of the gradient, %")
    right.set_xticklabels(list(results[0].errors))
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


# --- command line ---------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtype", choices=POLICIES, default="bfloat16", help="default: %(default)s"
    )
    add_numbers(parser, NUMBERS)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_output(parser)
    options = parser.parse_args(argv)
    if options.width % options.heads:
        parser.error("--width must be a multiple of --heads")
    return options


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Compares the three versions of the program as the command line asks for.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        What each version came to, float32 first.
    """
    options, console = parse(argv), Console()
    keys = jax.random.split(jax.random.key(options.seed), 3)
    params = make_params(keys[0], options.layers, options.width)
    shape = (options.batch_size, options.context, options.width)
    x, target = (jax.random.normal(key, shape) for key in keys[1:])
    loss, policy = make_loss(options.heads), POLICIES[options.dtype]
    with_rule = policy.with_rules({"jit": attention_rule})
    versions = {
        "float32": loss,
        f"{options.dtype}": autocast(loss, policy=policy),
        f"{options.dtype}, fused": autocast(loss, policy=with_rule),
    }
    exact = jax.jit(jax.grad(loss))(params, x, target)
    results = []
    with progress_bar(console) as progress:
        task = progress.add_task("programs", total=len(versions))
        for name, fn in versions.items():
            results.append(measure(name, fn, (params, x, target), exact))
            progress.advance(task)
    show(results, console)
    picture = folder_of(options, "fused_attention") / "attention.png"
    draw(results, picture)
    console.print(f"Picture: {picture}", soft_wrap=True)
    return results


if __name__ == "__main__":
    main()
