"""`tune(cost="time")` against the search for the fewest, at the same bound: predicted time, runs.

    python benchmarks/tune_by_cost.py [--programs seeded pyramid experts energy small]

The bound is the error of the program in bfloat16 times ``--bound``. The predicted time is that of
all matmuls on an H100, by `explain`'s roofline. In November 2026 it was 15 % less for seeded, 11 %
for pyramid, 0 % for energy and small, and 2 % more for experts, in 4 to 7 runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_autocast import BF16, Policy, autocast, explain, tune

DEVICE = "h100"
Program = Callable[..., Any]


def _draw(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) / max(shape[0], 1) ** 0.5 for key, shape in pairs]


def seeded() -> tuple[Program, Sequence[Any]]:
    """A large product and two tiny ones: without either the bound is met."""
    w, x = (jax.random.normal(jax.random.key(k), (1024, 1024)) for k in (0, 1))
    tiny = jax.random.normal(jax.random.key(2), (8, 8))

    def run(w: Any, x: Any) -> Any:
        with jax.named_scope("large"):
            parts = [jnp.ravel(x @ w)[:64] / 18.8]
        for name in ("tiny_0", "tiny_1"):
            with jax.named_scope(name):
                parts.append(0.9 * jnp.ravel(tiny @ (tiny + 0.9)) / 3.0)
        return jnp.concatenate(parts)

    return run, (w, x)


def pyramid() -> tuple[Program, Sequence[Any]]:
    """A perceptron whose layers become narrower: each adds about the same error."""
    widths = (2048, 2048, 2048, 512, 64, 16)
    params = _draw(0, *itertools.pairwise(widths))

    def run(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return x

    return run, (params, *_draw(1, (512, widths[0])))


def experts() -> tuple[Program, Sequence[Any]]:
    """Two large perceptrons, and a small product that says how much of each is taken."""
    up, down, gate = _draw(0, (2, 1024, 2048), (2, 2048, 1024), (1024, 8))
    params = {"up": up / 23, "down": down / 32, "gate": 3 * gate}

    def run(params: Any, x: Any) -> Any:
        with jax.named_scope("router"):
            share = jax.nn.softmax(4 * jnp.tanh(x @ params["gate"]))
        parts = []
        for k in range(2):
            with jax.named_scope(f"expert_{k}"):
                h = jax.nn.gelu(x @ params["up"][k]) @ params["down"][k]
                parts.append(h * share[:, k : k + 1])
        return sum(parts)

    return run, (params, *_draw(1, (512, 1024)))


def energy() -> tuple[Program, Sequence[Any]]:
    """A network, and an energy of few coordinates of which large numbers cancel."""
    w, v, frame = _draw(0, (1024, 2048), (2048, 1024), (16, 16))
    params = {"w": w, "v": v, "frame": frame}

    def run(params: Any, x: Any) -> Any:
        with jax.named_scope("network"):
            h = jnp.tanh(x @ params["w"]) @ params["v"]
        with jax.named_scope("energy"):
            moved = x[:, :16] @ params["frame"]
            part = jnp.square(30.0 + moved) - 900.0
        return h, part

    return run, (params, *_draw(1, (512, 1024)))


def small() -> tuple[Program, Sequence[Any]]:
    """A perceptron so small that a kernel takes longer to start than to run."""
    params = _draw(0, (32, 64), (64, 64), (64, 8))

    def run(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return x

    return run, (params, *_draw(1, (64, 32)))


PROGRAMS = {each.__name__: each for each in (seeded, pyramid, experts, energy, small)}


def predicted(fn: Program, args: Sequence[Any], policy: Policy) -> float:
    """Returns the seconds that the products of a program take at best."""
    (time,) = explain(fn, *args, policy=policy, device=DEVICE).devices
    return time.low_seconds or 0.0


def line(program: Callable[[], tuple[Program, Sequence[Any]]], share: float) -> str:
    """Runs both searches of a program, and says what they found.

    Args:
        program: Makes it.
        share: The bound, as a share of its error in bfloat16.
    """
    fn, args = program()
    exact, low = (jax.tree.leaves(jax.jit(f)(*args)) for f in (fn, autocast(fn, policy=BF16)))
    pairs = zip(exact, low, strict=True)
    bound = share * max(float(jnp.linalg.norm(y - x) / jnp.linalg.norm(x)) for x, y in pairs)
    options: Any = {"policy": BF16, "tolerance": bound, "progress": False, "report": True}
    _, fewest = tune(fn, *args, **options)
    _, cheapest = tune(fn, *args, cost="time", device=DEVICE, **options)
    before, after = (1e6 * predicted(fn, args, report.policy) for report in (fewest, cheapest))
    return (
        f"bound {bound:.2e}: fewest {before:6.1f} us, {len(fewest.kept)} kept, {fewest.runs} runs; "
        f"by cost {after:6.1f} us, {len(cheapest.kept)} kept, {cheapest.runs} runs: "
        f"{100 * (1 - after / before):.0f} % less {cheapest.because}"
    )


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--bound", type=float, default=0.85)
    options = parser.parse_args()
    for name in options.programs:
        print(f"{name:8} {line(PROGRAMS[name], options.bound)}", flush=True)


if __name__ == "__main__":
    main()
