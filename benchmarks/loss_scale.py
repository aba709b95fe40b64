"""What skipping bad steps adds to an optimizer update, for this library and for others.

    python benchmarks/loss_scale.py                          # 100M parameters, a minute or two
    python benchmarks/loss_scale.py --parameters 1e6         # faster, and cache-bound
    python benchmarks/loss_scale.py --machine "..." --markdown

Every variant is one jitted step of adam on float32 arrays of 2500 x 2500 at most, with parameters
and state donated. The variants run in turn, many rounds of them, so that load on the machine meets
all alike; ratios are taken within a round. Gradients are an argument: they are there already, as
after a backward pass.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import optax
from comparison import tables
from comparison.skipping import SCALE, WAYS, Optimizer, with_optax

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")
SIDE = 2500

Params = list[jax.Array]


BASE = "optax.adam"
VARIANTS: dict[str, Callable[[], Optimizer]] = {
    name: lambda way=way: way(optax.adam(1e-3)) for name, way in {BASE: with_optax, **WAYS}.items()
}


def arrays(parameters: float, seed: int) -> Params:
    """Square arrays of together about so many elements."""
    count = max(1, round(parameters / SIDE**2))
    side = round(math.sqrt(parameters / count))
    keys = jax.random.split(jax.random.key(seed), count)
    return [jax.random.normal(key, (side, side)) for key in keys]


class Runner:
    """A compiled variant, its arrays and its times."""

    def __init__(self, name: str, parameters: float, grads: Params):
        init, step = VARIANTS[name]()
        self.params = arrays(parameters, 0)
        self.state = jax.jit(init)(self.params)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, grads)
        self.step = lowered.compile()
        memory = self.step.memory_analysis()
        self.temporary = None if memory is None else memory.temp_size_in_bytes
        self.seconds: list[float] = []

    def run(self, grads: Params) -> None:
        jax.block_until_ready((self.params, self.state))
        start = time.perf_counter()
        self.params, self.state = self.step(self.params, self.state, grads)
        jax.block_until_ready((self.params, self.state))
        self.seconds.append(time.perf_counter() - start)


def measure(parameters: float, rounds: int) -> dict[str, Runner]:
    """Runs all variants in turn, in an order that rotates from round to round."""
    grads = [SCALE * g for g in arrays(parameters, 1)]
    runners = {name: Runner(name, parameters, grads) for name in VARIANTS}
    for runner in runners.values():
        runner.run(grads)
        runner.seconds.clear()
    order = list(runners.values())
    for _ in range(rounds):
        for runner in order:
            runner.run(grads)
        order.append(order.pop(0))
    return runners


def table(runners: dict[str, Runner]) -> list[list[str]]:
    """Returns the cells of the table, its header first."""
    rows = [["", "median ms", "min ms", "ratio", "ratio of min", "temporary MB"]]
    base = runners[BASE].seconds
    for name, runner in runners.items():
        seconds = runner.seconds
        ratio = statistics.median(s / b for s, b in zip(seconds, base, strict=True))
        temporary = "" if runner.temporary is None else f"{runner.temporary / 1e6:.0f}"
        median, least = (f"{1e3 * of(seconds):.1f}" for of in (statistics.median, min))
        rows.append(
            [name, median, least, f"{ratio:.2f}", f"{min(seconds) / min(base):.2f}", temporary]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> list[list[str]]:
    """Runs the comparison and returns the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--machine", help="its kind, for the table; the default is the device's")
    parser.add_argument("--markdown", action="store_true", help=f"write into {RESULTS.name}")
    chosen = parser.parse_args(arguments)
    machine = chosen.machine or jax.devices()[0].device_kind
    millions = f"{chosen.parameters / 1e6:g}M parameters"
    head = f"{machine}, JAX {jax.__version__}, {millions}, {chosen.rounds} rounds"
    print(head)
    rows = table(measure(chosen.parameters, chosen.rounds))
    print(tables.as_text(rows))
    if chosen.markdown:
        text = f"{head}:\n\n{tables.as_markdown(rows)}"
        name = f"loss_scale {millions} {machine} JAX {jax.__version__}"
        tables.write_between_markers(RESULTS, name, text)
    return rows


if __name__ == "__main__":
    main()
