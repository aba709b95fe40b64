"""Predicted against measured: what rounding each product of a trained model does to its loss.

    python benchmarks/effects.py [--models GPT ViT ResNet LSTM] [--steps 300]
    python benchmarks/effects.py --models Gemma2 --formats bfloat16

A small model is trained in float32. `explain_effects` predicts the change of its loss for each
product alone, and then all of them are really rounded, each alone. Printed are, for each format,
Pearson's r of the two over all products; the share of products with at least 1 % of the largest
effect whose prediction is within a factor of 2; and the same r where the products with the largest
predictions, ``--runs`` of them, have their measured effect, as in the report. In November 2026,
with JAX 0.12 on a CPU, r was

| | bfloat16 | float16 | e4m3 | e4m3 in the report |
|---|---|---|---|---|
| GPT | 0.9997 | 0.9999 | 0.958 | 0.9996 |
| ViT | 1.0000 | 0.9996 | 0.993 | 0.9991 |
| ResNet | 0.9993 | 1.0000 | 0.9988 | 1.0000 |
| LSTM | 0.993 | 0.972, in the report 1.0000 | 0.9992 | 1.0000 |

and at least 80 % were within a factor of 2 (71 % of the ViT's in e4m3, on an AMD). Four of the
LSTM's five products stand in loops, and are really rounded unless the user says otherwise.

Of a Gemma 2 of 2 billion parameters with all its 26 layers, but a width of 64, printed is what
`explain_effects` takes beside ``jit(grad)``: seconds of CPU time, both with compilation.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison.models import Gpt, Lstm, ResNet, Vit

from jmp_autocast import explain_effects
from jmp_autocast.inspect import Effect

CLASSES, SIZE, VOCABULARY, BATCH = 10, 16, 64, 8


class Task(NamedTuple):
    """A model and what it learns.

    Attributes:
        model: The model.
        batch: From a key to inputs and targets.
        learning_rate: That of AdamW.
    """

    model: Any
    batch: Callable[[Any], tuple[Any, Any]]
    learning_rate: float


def text(length: int) -> Callable[[Any], tuple[Any, Any]]:
    """Returns batches of counters with steps of 1 to 4, of whose numbers a tenth are random."""

    def batch(key: Any) -> tuple[Any, Any]:
        starts, steps, noise, which = jax.random.split(key, 4)
        start = jax.random.randint(starts, (BATCH, 1), 0, VOCABULARY)
        step = jax.random.randint(steps, (BATCH, 1), 1, 5)
        tokens = (start + step * jnp.arange(length + 1)) % VOCABULARY
        other = jax.random.randint(noise, tokens.shape, 0, VOCABULARY)
        tokens = jnp.where(jax.random.bernoulli(which, 0.1, tokens.shape), other, tokens)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def images(key: Any) -> tuple[Any, Any]:
    """Returns noisy images of stripes, whose class is the direction."""
    labels, noise, phases = jax.random.split(key, 3)
    label = jax.random.randint(labels, (BATCH,), 0, CLASSES)
    angle = (jnp.pi * label / CLASSES)[:, None, None]
    x, y = jnp.meshgrid(jnp.arange(SIZE), jnp.arange(SIZE))
    phase = jax.random.uniform(phases, (BATCH, 1, 1), maxval=2 * jnp.pi)
    waves = jnp.sin(1.5 * (x * jnp.cos(angle) + y * jnp.sin(angle)) + phase)[..., None]
    return waves + jax.random.normal(noise, (BATCH, SIZE, SIZE, 3)), label


def tasks(width: int, layers: int) -> dict[str, Task]:
    """Returns the tasks, with models of a width and a number of layers."""
    gpt = Gpt(width=width, layers=layers, vocabulary=VOCABULARY)
    vit = Vit(width=width, layers=layers, classes=CLASSES)
    resnet = ResNet(stages=(layers,) * 3, width=width // 4, classes=CLASSES)
    lstm = Lstm(width=width, layers=layers, vocabulary=VOCABULARY)
    return {
        "GPT": Task(gpt, text(32), 2e-3),
        "ViT": Task(vit, images, 1e-3),
        "ResNet": Task(resnet, images, 2e-3),
        "LSTM": Task(lstm, text(32), 5e-3),
    }


def trained(task: Task, steps: int) -> tuple[Callable[..., Any], Any]:
    """Returns the loss of a task, and its parameters after so many steps."""
    inputs, _ = task.batch(jax.random.key(0))
    variables = task.model.init(jax.random.key(1), inputs)
    params = variables["params"]
    rest = {name: x for name, x in variables.items() if name != "params"}

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        outputs, _ = task.model.apply({"params": params, **rest}, inputs, mutable=list(rest))
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    optimizer = optax.adamw(task.learning_rate)

    @jax.jit
    def train(params: Any) -> Any:
        def step(state: Any, key: Any) -> tuple[Any, Any]:
            params, memory = state
            value, gradients = jax.value_and_grad(loss)(params, *task.batch(key))
            updates, memory = optimizer.update(gradients, memory, params)
            return (optax.apply_updates(params, updates), memory), value

        keys = jax.random.split(jax.random.key(2), steps)
        (params, _), values = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        return params, values[-1]

    return loss, train(params)[0]


def gemma() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Returns the loss of Gemma2-2B's shape with a cut width, and its arguments."""
    width, hidden, heads, groups, size, layers, length = 64, 256, 8, 4, 8, 26, 64
    keys = iter(jax.random.split(jax.random.key(0), 8 * layers))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)

    def rotated(x: Any) -> Any:
        angle = jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(size // 2) / (size // 2))
        sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
        one, other = jnp.split(x, 2, -1)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    def attention(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[name]).reshape(*x.shape[:2], -1, size) for name in "qkv")
        q = (rotated(q) / size**0.5).reshape(*x.shape[:2], groups, -1, size)
        scores = 50 * jnp.tanh(jnp.einsum("btghk,bsgk->bghts", q, rotated(k)) / 50)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
        out = jnp.einsum("bghts,bsgk->btghk", jax.nn.softmax(scores), v)
        return out.reshape(*x.shape[:2], -1) @ p["o"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens[:, :-1]] * width**0.5
        for i, p in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{i}/attention"):
                x += norm(attention(p, norm(x, p["norm"][0])), p["norm"][1])
            with jax.named_scope(f"layer_{i}/mlp"):
                h = norm(x, p["norm"][2])
                h = jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])
                x += norm(h @ p["down"], p["norm"][3])
        logits = 30 * jnp.tanh(norm(x, params["norm"]) @ params["embedding"].T / 30)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    shapes = {"q": (width, heads * size), "k": (width, groups * size), "v": (width, groups * size)}
    shapes |= {"o": (heads * size, width), "gate": (width, hidden), "up": (width, hidden)}
    shapes |= {"down": (hidden, width)}
    each = lambda: {name: draw(*shape) for name, shape in shapes.items()}
    blocks = [{**each(), "norm": jnp.zeros((4, width))} for _ in range(layers)]
    params = {"embedding": draw(512, width), "layers": blocks, "norm": jnp.zeros(width)}
    return loss, (params, jax.random.randint(next(keys), (2, length + 1), 0, 512))


def print_seconds(formats: Sequence[str]) -> None:
    """Prints what effects of Gemma2-2B's shape take beside a gradient."""
    loss, args = gemma()
    look = functools.partial(explain_effects, formats=formats)
    seconds(jax.grad(jnp.sin), 1.0)  # what the first compilation of a process takes
    effects, gradient = seconds(look, loss, *args), seconds(jax.jit(jax.grad(loss)), *args)
    print(
        f"Gemma2: {effects:.1f} s in {', '.join(formats)}, and jit(grad) {gradient:.1f} s: "
        f"{effects / gradient:.1f} times"
    )


class Agreement(NamedTuple):
    """How well predictions agree with what was measured.

    Attributes:
        products: The number of products.
        r: Pearson's r of prediction and measurement.
        near: The share of products with at least 1 % of the largest effect that are predicted
            within a factor of 2.
        reported: Pearson's r where the products with the largest predictions are measured.
    """

    products: int
    r: float
    near: float
    reported: float


def agreement(rows: Sequence[Effect], runs: int) -> Agreement:
    """Returns how well the predictions of products agree with what was measured of all of them."""
    predicted = np.array([row.predicted for row in rows])
    measured = np.array([row.measured or 0.0 for row in rows])
    large = np.abs(measured) >= 0.01 * np.abs(measured).max()
    ratio = predicted[large] / measured[large]
    sizes = [max(abs(row.predicted), row.spread) for row in rows]
    known = np.argsort(sizes)[::-1][:runs]
    reported = predicted.copy()
    reported[known] = measured[known]
    return Agreement(
        len(rows),
        float(np.corrcoef(predicted, measured)[0, 1]),
        float(np.mean((ratio >= 0.5) & (ratio <= 2))),
        float(np.corrcoef(reported, measured)[0, 1]),
    )


def seconds(function: Callable[..., Any], *args: Any) -> float:
    """Returns how many seconds of CPU time a call takes, with compilation."""
    start = time.process_time()
    jax.block_until_ready(function(*args))
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Agreement]]:
    """Prints a line for each model and format, and returns what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="*", default=["GPT", "ViT", "ResNet", "LSTM"])
    parser.add_argument("--formats", nargs="*", default=["bfloat16", "float16", "e4m3"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rows", action="store_true", help="print each product, too")
    options = parser.parse_args(argv)
    if "Gemma2" in options.models:
        print_seconds(options.formats)
    found: dict[str, dict[str, Agreement]] = {}
    for name, task in tasks(options.width, options.layers).items():
        if name not in options.models:
            continue
        loss, params = trained(task, options.steps)
        args = (params, *task.batch(jax.random.key(3)))
        look = functools.partial(explain_effects, formats=options.formats)
        effects = look(loss, *args, kinds="product", runs=10**6)
        print(f"{name}: loss {effects.loss:.4f}")
        for format in options.formats:
            rows = effects.of(format, "product")
            each = found.setdefault(name, {})[format] = agreement(rows, options.runs)
            print(
                f"  {format:9} {each.products:3} products, r {each.r:.4f}, within a factor of 2 "
                f"{100 * each.near:3.0f} %, r of the report {each.reported:.4f}"
            )
            for row in rows if options.rows else ():
                print(f"    {row.predicted:+.2e} {row.measured:+.2e} {row.spread:.1e} {row.scope}")
    return found


if __name__ == "__main__":
    main()
