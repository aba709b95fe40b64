"""Stacks of equal layers: a loop over stacked parameters plans a layer as the middle of a model.

`Stack.compared` says which equations of a scanned layer have other dtypes than those of the middle
layers of the unrolled model, and in what its first and last layers differ from the middle ones.
`kept` says what the ViT of `benchmarks/comparison` keeps for the backward pass, plain, in
`nn.remat` and in `nn.jit`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.comparison import models
from jmp_autocast import Policy, explain
from jmp_autocast.inspect.report.kept import kept_bytes
from tests.fuzz.segments import NO_COMPUTATION

WIDTH, BATCH, TIME, VOCABULARY = 16, 2, 8, 12
LAYERS = 6
LEVELS = ("tensor_cores", "o1", "compute")
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
}

# --- blocks ---------------------------------------------------------------------------------


def norm(p: Any, h: Any) -> Any:
    mean = jnp.mean(h, -1, keepdims=True)
    square = jnp.mean(h * h, -1, keepdims=True)
    return (h - mean) * lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-5) * p["s"] + p["b"]


def mlp(p: Any, h: Any) -> Any:
    return jax.nn.gelu(h @ p["up"] + p["b4"]) @ p["down"] + p["b"]


def attention(p: Any, h: Any) -> Any:
    q, k, v = h @ p["w"], h @ p["q"], h @ p["v"]
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / WIDTH**0.5) @ v @ p["w"] + p["b"]


def two_sums(p: Any, h: Any) -> Any:
    h = h + attention(p, norm(p, h))
    return h + mlp(p, norm(p, h))


def gated(p: Any, h: Any) -> Any:
    n = norm(p, h)
    return h + (jax.nn.silu(n @ p["up"]) * (n @ p["gate"])) @ p["down"]


def highway(p: Any, h: Any) -> Any:
    gate = jax.nn.sigmoid(h @ p["w"] + p["b"])
    return gate * jnp.tanh(h @ p["v"]) + (1 - gate) * h


Block = Callable[[Any, Any], Any]
BLOCKS: dict[str, Block] = {
    "one sum": lambda p, h: h + mlp(p, norm(p, h)),
    "two sums": two_sums,
    "parallel": lambda p, h: (lambda n: h + (attention(p, n) + mlp(p, n)))(norm(p, h)),
    "gated": gated,
    "highway": highway,
    "scaled branch": lambda p, h: h + p["scale"] * mlp(p, norm(p, h)),
    "post-norm": lambda p, h: norm(p, h + mlp(p, h)),
    "norm on the branch": lambda p, h: h + norm(p, mlp(p, h)),
}


def shapes_of(name: str) -> Any:
    """The types of the parameters of one layer."""
    if name in FLAX:
        h = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.float32)
        return jax.eval_shape(FLAX[name].init, jax.random.key(0), h)
    wide = {"up": (WIDTH, 4 * WIDTH), "gate": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    square = dict.fromkeys("wqv", (WIDTH, WIDTH))
    rows = dict.fromkeys(("s", "b", "scale"), (WIDTH,)) | {"b4": (4 * WIDTH,)}
    shapes = wide | square | rows
    return {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}


FLAX = {"GPT": models.Block(heads=2, causal=True), "ViT": models.Block(heads=2)}
BLOCKS |= {name: block.apply for name, block in FLAX.items()}

# --- stacks ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model of equal layers."""

    block: str
    beginning: str = "product"
    wrapper: str = "plain"
    level: str = "o1"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.block}, {self.beginning}, {self.wrapper}, {self.level}, {self.dtype}"

    def rows(self, scanned: bool) -> list[list[Any]]:
        """What `explain` says of each layer, without calls, casts and what moves elements."""
        one = shapes_of(self.block)
        stacked = lambda s: jax.ShapeDtypeStruct((LAYERS, *s.shape), s.dtype)
        layers = jax.tree.map(stacked, one) if scanned else [one] * LAYERS
        array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        params = {"embed": array(WIDTH, WIDTH), "table": array(VOCABULARY, WIDTH),
                  "head": array(WIDTH, VOCABULARY), "layers": layers,
                  "norm": dict.fromkeys("sb", array(WIDTH))}  # fmt: skip
        data = array(BATCH, TIME, WIDTH), jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32)
        policy = Policy(self.dtype, level=self.level)
        report = explain(self._model(scanned), params, *data, policy=policy)
        of_layer: dict[str, list[Any]] = {}
        for row in report.rows:
            layer = row.scope.split("/")[0]
            if layer.startswith("layer") and row.primitive not in NO_COMPUTATION:
                of_layer.setdefault(layer, []).append(row)
        return list(of_layer.values())

    def _model(self, scanned: bool) -> Callable[..., Any]:
        block = WRAPPERS[self.wrapper](BLOCKS[self.block])

        def step(h: Any, p: Any) -> Any:
            with jax.named_scope("layer"):
                return block(p, h), None

        def model(params: Any, x: Any, ids: Any) -> Any:
            h = x @ params["embed"] if self.beginning == "product" else params["table"][ids]
            if scanned:
                h = lax.scan(step, h, params["layers"])[0]
            else:
                for i, p in enumerate(params["layers"]):
                    with jax.named_scope(f"layer{i}"):
                        h = block(p, h)
            return norm(params["norm"], h) @ params["head"]

        return model

    def compared(self) -> Compared:
        unrolled, (scanned,) = self.rows(False), self.rows(True)
        middle = unrolled[LAYERS // 2]
        differs = {
            f"layer {i}": differences(middle, rows) for i, rows in enumerate(unrolled) if rows
        }
        return Compared(self, differences(middle, scanned), {k: v for k, v in differs.items() if v})


@dataclasses.dataclass(frozen=True)
class Compared:
    """In what a scanned layer, and the first and last unrolled ones, differ from the middle."""

    stack: Stack
    scanned: list[str]
    unrolled: dict[str, list[str]]


def text_of(row: Any) -> str:
    return f"{row.primitive} {' '.join(row.operands)} -> {' '.join(row.results)}"


def differences(middle: Sequence[Any], other: Sequence[Any]) -> list[str]:
    """The rows of two layers that differ, each with its reason."""
    texts = [[text_of(row) for row in rows] for rows in (middle, other)]
    found = []
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            found += [f"- {_reasoned(row)}" for row in middle[i:j]]
            found += [f"+ {_reasoned(row)}" for row in other[k:m]]
    return found


def _reasoned(row: Any) -> str:
    cause = f", {row.cause}" if row.cause else ""
    return f"{text_of(row)}  ({row.reason}{cause}; {row.source.split('/')[-1]})"


# --- what the benchmarks' ViT keeps -----------------------------------------------------------


MODULE_WRAPPERS = {"plain": lambda block: block, "nn.remat": nn.remat, "nn.jit": nn.jit}


class Kept(NamedTuple):
    """Bytes kept for the backward pass, and the dtypes of the sums of the stream (by hand none)."""

    nbytes: int
    stream: tuple[str, ...]


@functools.lru_cache(maxsize=64)
def kept(wrapper: str, level: str | None, layers: int = 6) -> Kept:
    """What a ViT keeps for its backward pass; without a level with casts by hand."""
    dtype = jnp.bfloat16 if level is None else None
    original = models.Block
    models.Block = MODULE_WRAPPERS[wrapper](original)
    try:
        model = models.Vit(layers=layers, width=128, heads=4, dtype=dtype)
        images = jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32)
        params = jax.eval_shape(model.init, jax.random.key(0), images)

        def loss(params: Any, images: Any) -> Any:
            logits = model.apply(params, images).astype(jnp.float32)
            return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

        if level is not None:
            report = explain(loss, params, images, policy=Policy("bfloat16", level=level))
            of_stream = [((8, 65, 128),) * 2, "add"]
            sums = [r for r in report.rows if [r.operand_shapes, r.primitive] == of_stream]
            return Kept(report.totals.residual_nbytes, tuple(r.results[0] for r in sums))
        leaves, tree = jax.tree.flatten((params, images))
        run = lambda *xs: [loss(*jax.tree.unflatten(tree, xs))]
        found = kept_bytes(run, leaves, range(len(leaves) - 1))
        return Kept(found.nbytes, ())
    finally:
        models.Block = original


def wrongly_kept(level: str, layers: int = 6) -> str:
    """Says what a checkpoint or a call around each block changes; empty if it is nothing.

    A call keeps what the plain model keeps. A checkpoint keeps the stream: in the dtypes that it
    has plain, and so at level compute in as many bytes as with casts by hand.
    """
    found = {name: kept(name, level, layers) for name in MODULE_WRAPPERS}
    wrong = [f"stream in {name}" for name, k in found.items() if k.stream != found["plain"].stream]
    if found["nn.jit"].nbytes != found["plain"].nbytes:
        wrong.append("bytes in nn.jit")
    if level == "compute":
        by_hand = {name: kept(name, None, layers) for name in MODULE_WRAPPERS}
        wrong += [f"bytes of {n}" for n, k in found.items() if k.nbytes != by_hand[n].nbytes]
    return ", ".join(wrong)
