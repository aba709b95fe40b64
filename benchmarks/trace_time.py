"""What autocast adds to tracing and lowering, as ratios to the same program without it.

    python benchmarks/trace_time.py

Prints the time for tracing and lowering Flax transformers of 12 and 48 layers, forward and
gradient, in float32, under autocast and by hand (in turn, best of several), the same for a
transformer of 12 layers and an MLP of 100 in plain JAX, the planning of one jitted layer that is
called 96 times, planning against tracing for 24 transformer blocks and for a chain of 2,000 and of
20,000 equations, the cost of planned residuals of 48 unrolled layers, and the ratios for two Keras
models, which call hundreds of small functions. With ``--only hf`` also those for BERT, GPT-2 and T5
of Hugging Face, whose last models in Flax are in ``transformers<5``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import time
from collections.abc import Callable
from statistics import mean
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp

from jmp_autocast import BF16, autocast, keep_less
from jmp_autocast.interpreters import Plan, Planner, Request, Source, ValueState
from jmp_autocast.interpreters.plan.float_dtypes import float_dtype


class Block(nn.Module):
    """A pre-norm transformer block."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = self.dtype
        h = nn.LayerNorm(dtype=d)(x)
        x = x + nn.SelfAttention(num_heads=4, dtype=d)(h)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=d)(nn.LayerNorm(dtype=d)(x)))
        return x + nn.Dense(x.shape[-1], dtype=d)(h)


class Transformer(nn.Module):
    """A small GPT without its mask."""

    layers: int = 12
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(1000, 256, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = Block(self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def make_loss(model: nn.Module) -> Callable[..., jax.Array]:
    """Returns a next-token loss, a new function object at each call (JAX caches by function)."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)
        logp = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logp, tokens[..., None], -1))

    return loss


def trace_and_lower(function: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """Returns the seconds of the processor for tracing and for lowering."""
    # What was made before is not visited again: a full collection of the objects of Keras took
    # 0.35 s, twice the time for lowering, wherever it fell.
    gc.collect()
    gc.freeze()
    start = time.process_time()
    traced = jax.jit(function).trace(*args)
    middle = time.process_time()
    traced.lower()
    return middle - start, time.process_time() - middle


# How many functions call the one that traces. CPython takes memory for frames by the piece, so that
# what a loop calls at the end of one takes a new piece each time: plain tracing takes up to twice
# as long at one depth as at another, and after some 100 frames all repeats itself.
DEPTHS = range(0, 110, 10)


def at_depth(depth: int, call: Callable[[], Any]) -> Any:
    """Returns what a function returns that stands deeper by so many frames."""
    return call() if depth == 0 else at_depth(depth - 1, call)


def print_header(programs: str, repeats: int) -> None:
    """Prints what the columns of `print_ratios` are."""
    print(f"{programs}, seconds of the processor: means over {len(DEPTHS)} depths of the stack, at")
    print(
        f"each of which the best of {repeats} counts; the last column has those at the best depth"
    )
    print(f"{'':46}{'trace s':>10}{'lower s':>10}{'ratio':>8}{'at best':>8}")


def print_ratios(
    name: str, make: Callable[[Any], Any], casts: dict[str, Any], args: Any, repeats: int
) -> None:
    """Prints the times of a program without and with casts, the variants in turn.

    Args:
        name: The name of the program.
        make: Returns it, a new function object, from what casts its model.
        casts: What casts the model; the first one is what others are compared with.
        args: The arguments of the program.
        repeats: How many runs at each depth of the stack, of which the best counts.
    """
    trace_and_lower(make(next(iter(casts.values()))), *args)  # what is imported first, and cached
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in casts}
    for depth in DEPTHS:
        best = dict.fromkeys(casts, (float("inf"), float("inf")))
        for _ in range(repeats):
            for label, cast in casts.items():
                timed = at_depth(depth, lambda cast=cast: trace_and_lower(make(cast), *args))
                best[label] = min(best[label], timed, key=sum)
        for label, pair in best.items():
            times[label].append(pair)
    base, base_at_best = (of(map(sum, next(iter(times.values())))) for of in (mean, min))
    for label, pairs in times.items():
        trace, lower = map(mean, zip(*pairs, strict=True))
        ratio, at_best = (trace + lower) / base, min(map(sum, pairs)) / base_at_best
        print(f"{name:26}{label:20}{trace:10.3f}{lower:10.3f}{ratio:8.2f}{at_best:8.2f}")


CASTS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda f: f,
    "autocast bfloat16": lambda f: autocast(f, jnp.bfloat16),
    "autocast float16": lambda f: autocast(f, jnp.float16),
}
BY_HAND: dict[str, Callable[[Any], Any]] = CASTS | {"by hand": lambda f: f}


def dtype_of(cast: Callable[[Any], Any]) -> Any:
    """Returns the dtype that a program itself casts to: with float32 it casts nothing."""
    return jnp.bfloat16 if cast is BY_HAND["by hand"] else jnp.float32


def measure_transformer(repeats: int) -> None:
    """Prints the ratios for transformers of 12 and 48 layers, forward and gradient."""
    print_header("transformers", repeats)
    for layers in (12, 48):
        tokens = jnp.zeros((8, 128), jnp.int32)
        args = jax.eval_shape(Transformer(layers).init, jax.random.key(0), tokens), tokens
        make = lambda dtype, n=layers: make_loss(Transformer(n, dtype))
        print_both(f"{layers} layers", make, args, repeats)


def print_both(name: str, make: Callable[[Any], Any], args: Any, repeats: int) -> None:
    """Prints the ratios of a loss, forward and gradient.

    Args:
        name: The name of the program.
        make: Returns the loss, a new function object, from the dtype that it casts to itself.
        args: As for `print_ratios`.
        repeats: As for `print_ratios`.
    """
    forward = lambda cast: cast(make(dtype_of(cast)))
    print_ratios(f"{name}, forward", forward, BY_HAND, args, repeats)
    print_ratios(f"{name}, gradient", lambda c: jax.grad(forward(c)), BY_HAND, args, repeats)


def make_mlp(dtype: Any) -> Callable[..., jax.Array]:
    """Returns a loss without a layer library, a new function object at each call."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for w, b in params:
            x = jax.nn.relu(x @ w.astype(dtype) + b.astype(dtype))
        return jnp.mean(x.astype(jnp.float32))

    return loss


def norm(x: jax.Array) -> jax.Array:
    """Returns normalized activations, in float32."""
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def make_plain_transformer(dtype: Any) -> Callable[..., jax.Array]:
    """Returns the loss of a transformer without a layer library, a new object at each call."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        x = params["embedding"][tokens]
        for p in params["layers"]:
            h = norm(x).astype(dtype)
            q, k, v = (jnp.einsum("btd,dhe->bthe", h, p[name]) for name in "qkv")
            scores = jnp.einsum("bqhe,bkhe->bhqk", q, k).astype(jnp.float32) / 8
            weights = jax.nn.softmax(scores).astype(dtype)
            x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, p["o"])
            h = jax.nn.gelu(norm(x).astype(dtype) @ p["up"])
            x = x + h @ p["down"]
        logits = (x @ params["embedding"].T).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    return loss


def measure_plain(repeats: int) -> None:
    """Prints the ratios for a transformer and an MLP in plain JAX, forward and gradient."""
    print_header("plain JAX", repeats)
    layer = {name: jnp.ones((64, 4, 16)) for name in "qkv"} | {"o": jnp.ones((4, 16, 64))}
    layer |= {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    params = {"embedding": jnp.ones((256, 64)), "layers": [layer] * 12}
    args = (params, jnp.zeros((2, 32), jnp.int32))
    print_both("12 layers", make_plain_transformer, args, repeats)
    args = ([(jnp.ones((64, 64)), jnp.ones(64))] * 100, jnp.ones((8, 64)))
    print_both("MLP of 100 layers", make_mlp, args, repeats)


def measure_shared_layer(calls: int, repeats: int) -> None:
    """Prints how often a layer that is jitted once and called often is planned."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w["kernel"] + w["bias"]))

    def loss(layers: list[Any], x: jax.Array) -> jax.Array:
        for w in layers:
            x = layer(w, x)
        return jnp.sum(x)

    w = {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}
    args = ([w] * calls, jnp.ones((8, 64)))
    planner = CountingPlanner(BF16)
    trace_and_plan(loss, *args, planner=planner)
    times = {"float32": float("inf"), "autocast bfloat16": float("inf")}
    for _ in range(repeats):
        for name, function in (
            ("float32", lambda *a: loss(*a)),
            ("autocast bfloat16", autocast(lambda *a: loss(*a), jnp.bfloat16)),
        ):
            times[name] = min(times[name], sum(trace_and_lower(jax.grad(function), *args)))
    print(
        f"\none jitted layer called {calls} times: "
        f"jaxprs planned {planner.planned} (with the caller)"
    )
    ratio = times["autocast bfloat16"] / times["float32"]
    print(
        f"trace + lower {times['float32']:.3f} s, autocast {times['autocast bfloat16']:.3f} s: "
        f"{ratio:.2f}x"
    )


class CountingPlanner(Planner):
    """Counts the jaxprs that it plans."""

    planned = 0

    def _plan(self, jaxpr: Any, *rest: Any) -> Plan:
        self.planned += 1
        return super()._plan(jaxpr, *rest)


def trace_and_plan(
    function: Callable[..., Any], params: Any, *args: Any, planner: Planner | None = None
) -> tuple[float, float]:
    """Returns the seconds for tracing a function and for planning it."""
    planner = planner or Planner(BF16)
    start = time.perf_counter()
    closed = jax.make_jaxpr(function)(params, *args)
    middle = time.perf_counter()
    leaves = len(jax.tree.leaves(params))
    inputs = [
        ValueState(float_dtype(v.aval), Source.PARAM if i < leaves else Source.DATA)
        for i, v in enumerate(closed.jaxpr.invars)
    ]
    wanted = [Request(float_dtype(v.aval)) for v in closed.jaxpr.outvars]
    planner.plan(planner.prepare(closed), inputs, wanted)
    return middle - start, time.perf_counter() - middle


def measure_planning(repeats: int) -> None:
    """Prints the time for planning beside the time for tracing."""

    def chain(length: int) -> Callable[..., jax.Array]:
        def function(w: jax.Array, x: jax.Array) -> jax.Array:
            for _ in range(length // 5):
                x = jnp.sin(jnp.tanh(x @ w) * 0.5 + 1.0)
            return x

        return function

    tokens, square = jnp.zeros((2, 128), jnp.int32), jnp.ones((8, 8))
    blocks = Transformer(layers=24)
    params = jax.eval_shape(blocks.init, jax.random.key(0), tokens)
    cases = {
        "24 blocks": lambda: trace_and_plan(make_loss(blocks), params, tokens),
        "2,000 equations": lambda: trace_and_plan(chain(2000), square, square),
        "20,000 equations": lambda: trace_and_plan(chain(20000), square, square),
    }
    print(f"\n{'':20}{'trace s':>10}{'plan s':>10}")
    plans = {}
    for name, measure in cases.items():
        times = [measure() for _ in range(repeats)]
        trace, plans[name] = (min(column) for column in zip(*times, strict=True))
        print(f"{name:20}{trace:10.3f}{plans[name]:10.3f}")
    ratio = plans["20,000 equations"] / plans["2,000 equations"]
    print(f"ten times as many equations: {ratio:.1f}x")


def measure_residuals(layers: int, repeats: int) -> None:
    """Prints what planned residuals add to tracing, in seconds of the processor."""
    model = Transformer(layers=layers)
    tokens = jnp.zeros((8, 128), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    variants = {
        "float32": lambda f: f,
        "float32, keep_less": lambda f: keep_less(f, residuals="recompute"),
        "autocast": lambda f: autocast(f, policy=BF16),
        "autocast, residuals": lambda f: keep_less(autocast(f, policy=BF16), residuals="recompute"),
    }
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(repeats):
        for name, make in variants.items():
            gradient = jax.jit(jax.grad(make(make_loss(model))))
            start = time.process_time()
            gradient.trace(params, tokens)
            best[name] = min(best[name], time.process_time() - start)
    print(f"\n{layers} unrolled layers, everything planned, jit(grad(loss)), best of {repeats}")
    print(f"{'':20}{'trace s':>10}")
    for name, seconds in best.items():
        print(f"{name:20}{seconds:10.3f}")
    added = best["autocast, residuals"] / best["autocast"] - 1
    alone = best["float32, keep_less"] / best["float32"] - 1
    print(f"residuals add {added:+.0%} to autocast, {alone:+.0%} to float32")


def measure_keras(repeats: int) -> None:
    """Prints the ratios for Keras models, forward and gradient, in seconds of the processor."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    print_header("\nKeras models", repeats)
    for name in ("ResNet50", "MobileNetV2"):
        model = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)
        trainable, rest = (
            [v.value for v in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        args = trainable, rest, jnp.ones((2, 64, 64, 3))
        for training in (False, True):
            make = keras_gradient if training else keras_forward
            casts = {
                "float32": lambda f: f,
                "autocast bfloat16": lambda f: autocast(f, policy=BF16, params=(0, 1)),
            }
            name_of_row = f"{name}, {'gradient' if training else 'forward'}"
            print_ratios(name_of_row, functools.partial(make, model), casts, args, repeats)


def keras_forward(model: Any, cast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the model in inference, a new function object at each call."""
    return cast(lambda trainable, rest, x: model.stateless_call(trainable, rest, x)[0])


def keras_gradient(model: Any, cast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradient of a loss in training, with the new statistics."""

    def loss(trainable: Any, rest: Any, x: jax.Array) -> Any:
        shares, state = model.stateless_call(trainable, rest, x, training=True)
        return -jnp.mean(jnp.log(shares + 1e-6)), state

    return jax.grad(cast(loss), has_aux=True)


def measure_hf(repeats: int) -> None:
    """Prints the ratios for BERT, GPT-2 and T5 of Hugging Face, 12 small layers each.

    T5 has as many in its decoder.
    """
    hf = importlib.import_module("transformers")
    small = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4}
    ids = jnp.ones((2, 64), jnp.int32)
    same, positions = jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(64), ids.shape)
    bert = hf.FlaxBertForSequenceClassification(
        hf.BertConfig(num_hidden_layers=12, intermediate_size=128, **small), _do_init=False
    )
    gpt = hf.FlaxGPT2LMHeadModel(hf.GPT2Config(num_hidden_layers=12, **small), _do_init=False)
    # Their T5 names an argument of `jnp.clip` as JAX did before 0.10.
    mock.patch.object(jnp, "clip", functools.partial(clip_by_old_names, jnp.clip)).start()
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 12}
    t5 = hf.FlaxT5ForConditionalGeneration(hf.T5Config(vocab_size=1000, **sizes), _do_init=False)
    models = {
        "BERT": (bert, (ids, same, jnp.zeros_like(ids), positions, jnp.ones((12, 4)))),
        "GPT-2": (gpt, (ids, same, positions)),
        "T5": (t5, (ids, same, ids, same)),
    }
    print_header("\nHugging Face", repeats)
    casts = {"float32": lambda f: f, "autocast bfloat16": lambda f: autocast(f, policy=BF16)}
    for name, (model, inputs) in models.items():
        params = jax.eval_shape(
            lambda key, model=model: model.init_weights(key, ids.shape), jax.random.key(0)
        )
        for training in (False, True):
            print_ratios(
                f"{name}, {'gradient' if training else 'forward'}",
                functools.partial(hf_gradient if training else hf_forward, model.module),
                casts,
                (params, *inputs),
                repeats,
            )


def clip_by_old_names(
    clip: Callable[..., jax.Array], x: jax.Array, a_min: Any = None, a_max: Any = None, **new: Any
) -> jax.Array:
    """`jnp.clip` with the names of its arguments before JAX 0.10, and after."""
    return clip(x, **({"min": a_min, "max": a_max} | new))


def hf_forward(module: nn.Module, cast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the logits of a model of Hugging Face, a new function object at each call."""

    def logits(params: Any, *inputs: jax.Array) -> jax.Array:
        return module.apply({"params": params}, *inputs).logits

    return cast(logits)


def hf_gradient(module: nn.Module, cast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradient of a loss of one class."""
    logits = hf_forward(module, lambda f: f)

    def loss(params: Any, *inputs: jax.Array) -> jax.Array:
        return -jnp.mean(jax.nn.log_softmax(logits(params, *inputs))[..., 0])

    return jax.grad(cast(loss))


# What the extra `dev` of the project installs, and what needs a package beside it.
PARTS: dict[str, Callable[[int], None]] = {
    "transformer": measure_transformer,
    "plain": measure_plain,
    "shared layer": lambda repeats: measure_shared_layer(96, repeats),
    "planning": measure_planning,
    "residuals": lambda repeats: measure_residuals(48, repeats),
    "keras": measure_keras,
}
PARTS_ON_REQUEST = {"hf": measure_hf}


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the best counts")
    parser.add_argument(
        "--only", nargs="+", choices=(*PARTS, *PARTS_ON_REQUEST), default=tuple(PARTS)
    )
    args = parser.parse_args()
    for name in args.only:
        (PARTS | PARTS_ON_REQUEST)[name](args.repeats)


if __name__ == "__main__":
    main()
