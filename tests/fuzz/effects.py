"""Random programs with effects: values, gradients and the order of effects as without autocast.

    python -m tests.fuzz.effects --programs 500 --seed 1

A program writes to refs, calls back in order and makes tokens, in nested jits, loops, branches and
checkpoints, between operations that are recomputed for the backward pass or read 16 bits. It runs
under ``keep_less`` alone and, with each kind of ``residuals=``, around ``autocast``. Without
products nothing is in 16 bits, and the results are those of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jmp_autocast import autocast, keep_less

from .command import run_many
from .comparison import compile_quickly

WRAPPERS: Mapping[str, Callable[..., Any]] = {
    "keep_less": keep_less,
    **{
        f"residuals={kept!r}": lambda fn, kept=kept: keep_less(autocast(fn), residuals=kept)
        for kept in ("declared", "auto", "recompute", 0.5, 0.0)
    },
}
W = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0].astype(np.float32)
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "sin": lambda x: jnp.sin(2 * x),
    "tanh": jnp.tanh,
    "gate": lambda x: x * jax.nn.sigmoid(x),
    "pick": lambda x: x * jax.jit(jax.nn.log_softmax)(x)[1] / 8,
    "product": lambda x: jnp.tanh(W @ x),
}
# What the products of a program lose in 16 bits, relative to one; without products nothing.
TOLERANCES = {True: 0.3, False: 1e-4}
EFFECTS = "ref write write add read read say say debug token".split()
# `call` hands its refs over, `jit` closes over them; `again` calls one jitted function twice.
BLOCKS = "jit jit call again scan scan fori cond checkpoint while".split()
Block: TypeAlias = list[tuple[str, int, Any]]


def draw(rng: np.random.Generator, depth: int = 0) -> Block:
    """Returns a block: names of statements, each with a number, and some with a block inside."""
    block: Block = []
    for _ in range(rng.integers(2, 5)):
        kind = rng.choice(3, p=(0.3, 0.45, 0.25) if depth < 2 else (0.4, 0.6, 0.0))
        name = str(rng.choice((list(OPERATIONS), EFFECTS, BLOCKS)[kind]))
        inner = draw(rng, depth + 1) if name in BLOCKS else None
        block.append((name, int(rng.integers(1000)), inner))
    return block


class Run:
    """A program as a function of one array; it notes in which order it calls back."""

    def __init__(self, program: Block) -> None:
        self.program = program
        self.order: list[int] = []

    def __call__(self, x: Any) -> Any:
        refs = [jax.new_ref(jnp.cos(x))]
        return jnp.sum(self.block(self.program, x, refs) + refs[0][...])

    def block(self, block: Block, x: Any, refs: Sequence[Any]) -> Any:
        own = list(refs)  # what a block makes ends with it
        for name, number, inner in block:
            if name in OPERATIONS:
                x = OPERATIONS[name](x)
            elif name in BLOCKS:
                x = self.nested(name, inner, x, own)
            else:
                x = self.effect(name, number, x, own)
        return x

    def effect(self, name: str, number: int, x: Any, refs: list[Any]) -> Any:
        """Runs a statement with an effect; returns the value that goes on."""
        ref = refs[number % len(refs)]
        says = lambda _: self.order.append(number)
        if name == "ref":
            refs.append(jax.new_ref(jnp.sin(x + number)))
        elif name == "write":
            ref[...] = jnp.cos(ref[...] * x)
        elif name == "add":
            ref[...] += jnp.sin(x)
        elif name == "read":
            return jnp.sin(x + ref[...])
        elif name == "say":
            io_callback(says, None, lax.stop_gradient(x[0]), ordered=True)  # it has no derivative
        elif name == "debug":
            jax.debug.callback(says, x[0], ordered=True)
        else:
            jax.jit(lambda x: lax.after_all(lax.create_token(x)))(jnp.cos(x))
        return x

    def nested(self, name: str, inner: Block, x: Any, refs: Sequence[Any]) -> Any:
        """Runs a block inside of something; returns the value that goes on."""
        run = lambda x, *_: self.block(inner, x, refs)
        if name == "jit":
            return jax.jit(run)(x)
        if name == "call":
            return jax.jit(lambda x, *given: self.block(inner, x, given))(x, *refs)
        if name == "again":
            twice = jax.jit(run)
            return twice(jnp.tanh(twice(x)))
        if name == "checkpoint":
            return jax.checkpoint(run)(x)
        if name == "scan":
            return lax.scan(lambda x, _: (run(x), None), x, None, length=3)[0]
        if name == "fori":
            return lax.fori_loop(0, 2, lambda _, x: run(x), x)
        if name == "while":
            more = lambda carry: carry[1] < 2
            return lax.while_loop(more, lambda carry: (run(carry[0]), carry[1] + 1), (x, 0))[0]
        return lax.cond(jnp.sum(x) > 0, run, lambda x: x, x)


class Outcome(NamedTuple):
    """What a program made: its results, and the numbers of its callbacks in their order."""

    results: list[Any]
    order: list[int]


def outcome(program: Block, x: Any, wrap: Callable[..., Any], part: Callable[..., Any]) -> Outcome:
    """Runs a wrapped program once, compiled."""
    run = Run(program)
    results = jax.device_get(compile_quickly(jax.jit(part(wrap(run))).trace(x))(x))
    jax.effects_barrier()
    return Outcome(jax.tree.leaves(results), run.order)


class Checked(NamedTuple):
    """What became of a program: with or without its gradient, or JAX does not run it."""

    part: str
    wrong: list[str]
    program: Block


PARTS: Mapping[str, Callable[..., Any]] = {
    "values and gradients": jax.value_and_grad,
    "values": lambda f: f,
}


def check(seed: int, wrappers: Sequence[str] = tuple(WRAPPERS)) -> Checked:
    """Runs one random program as it is and in each wrapper."""
    rng = np.random.default_rng(seed)
    program, x = draw(rng), rng.standard_normal(8).astype(np.float32)
    tolerance = TOLERANCES["product" in str(program)]
    for part, derived in PARTS.items():
        try:
            results, order = outcome(program, x, lambda f: f, derived)
        except Exception:  # JAX has no derivative, or no such effect: it is the plain program
            continue
        wrong = []
        for name in wrappers:
            found, called = outcome(program, x, WRAPPERS[name], derived)
            if called != order:
                wrong.append(f"{name}: called {called}, expected {order}")
            for got, want in zip(found, results, strict=True):
                if not np.allclose(got, want, rtol=tolerance, atol=tolerance):
                    wrong.append(f"{name}: {got}, expected {want}")
        return Checked(part, wrong, program)
    return Checked("refused by JAX", [], program)


def main(argv: Sequence[str] | None = None) -> int:
    def checked(seed: int, index: int, _: str) -> tuple[str, str]:
        try:
            part, wrong, program = check(seed + index)
        except Exception as error:  # any error of autocast is a finding
            program = draw(np.random.default_rng(seed + index))
            part, wrong = "raised", [f"{type(error).__name__}: {error}"]
        return part, "\n".join([*wrong, str(program)] if wrong else [])

    return run_many("effects", checked, argv)


if __name__ == "__main__":
    raise SystemExit(main())
