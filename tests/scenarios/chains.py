"""Chains of sums and of factors: how much of what the layers of a deep model do is left in 16 bits.

The error is that of what the chain does to the value that it begins with: ``h[n] - h[0]`` of a sum,
``h[n]`` of a product, relative to float32. ``h[0]`` has an exact 16-bit value, so that rounding it
costs nothing. Programs are evaluated as their jaxprs say, with no digits that XLA would keep.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_autocast import Policy, autocast
from tests.fuzz.comparison import as_numbers, interpreted
from tests.fuzz.program import jax_settings

WIDTH, ROWS, VOCABULARY = 32, 16, 24

BOUND = 0.02
"""What a chain of sums may lose of what its branches add."""
ONE_ROUNDING = 2.0**-8
"""What a chain of factors may lose of its result: as much as rounding that alone to bfloat16."""


def norm(h: Any) -> Any:
    mean = jnp.mean(h, -1, keepdims=True)
    square = jnp.mean(h * h, -1, keepdims=True)
    return (h - mean) * lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-5)


def branch(p: Any, h: Any) -> Any:
    """A perceptron behind a norm, as in a transformer."""
    return jnp.tanh(norm(h) @ p["w"]) @ p["v"]


def field(p: Any, h: Any) -> Any:
    """The right hand side of an ordinary differential equation."""
    return jnp.tanh(h @ p["w"]) @ p["v"]


# Each makes the next value of parameters of the layer, the value, a condition and the factor. The
# factor of the first ones is an array of the layer's parameters, so that no dtype depends on it.
Layer = Callable[[Any, Any, Any, float], Any]
SUMS: dict[str, Layer] = {
    "LayerScale": lambda p, h, c, g: h + p["scale"] * branch(p, h),
    "ReZero": lambda p, h, c, g: h + p["alpha"] * field(p, h),
    "adaLN-zero": lambda p, h, c, g: h + (c @ p["gate"]) * branch(p, h),
    "Euler": lambda p, h, c, g: h + g * field(p, h),
    "leaky": lambda p, h, c, g: h + g * (field(p, h) - h),
    "plain": lambda p, h, c, g: h + jnp.tanh(norm(h) @ p["w"]) @ p["small"],
    "plain, parallel": lambda p, h, c, g: (
        h + (jnp.tanh(norm(h) @ p["w"]) @ p["small"] + (norm(h) @ p["small"]))
    ),
}
FACTOR_CHAINS: dict[str, Layer] = {
    "gates near 1": lambda p, h, c, g: h * jax.nn.sigmoid(h @ p["w"] - jnp.log(p["alpha"])),
    "complements": lambda p, h, c, g: h * (1 - p["alpha"] * jax.nn.sigmoid(h @ p["w"])),
    "decays": lambda p, h, c, g: h * jnp.exp(-p["alpha"] * jax.nn.softplus(h @ p["w"])),
    "products": lambda p, h, c, g: h * (1 + p["scale"] * field(p, h)),
    "highway": lambda p, h, c, g: (lambda t: t * field(p, h) + (1 - t) * h)(
        p["alpha"] * jax.nn.sigmoid(h @ p["w"])
    ),
}
LAYERS = SUMS | FACTOR_CHAINS
LITERAL = frozenset(name for name in LAYERS if name.startswith(("Euler", "leaky")))
"""Chains whose factor stands in the program's text."""


def _exact(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers that both 16-bit dtypes hold."""
    return (rng.integers(1, 17, shape) * rng.choice((-1, 1), shape) / 8).astype(np.float32)


def arguments(depth: int, factor: float) -> tuple[dict[str, Any], Any, Any, Any]:
    """Parameters, the input, the ids of rows of a table, and a condition."""
    rng = np.random.default_rng(depth)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    w, v = normal(depth, WIDTH, WIDTH) / WIDTH**0.5, normal(depth, WIDTH, WIDTH) / WIDTH**0.5
    scale = factor * (1 + 0.1 * normal(depth, WIDTH))
    gate = factor * normal(depth, WIDTH, WIDTH) / WIDTH**0.5
    layers = {"w": w, "v": v, "small": factor * v, "scale": scale, "gate": gate,
              "alpha": np.full(depth, factor, np.float32)}  # fmt: skip
    # A signed permutation: the product of an exact input is exact.
    embed = np.eye(WIDTH, dtype=np.float32)[rng.permutation(WIDTH)] * rng.choice((-1, 1), WIDTH)
    params = {"embed": embed.astype(np.float32), "table": _exact(rng, VOCABULARY, WIDTH)}
    condition = normal(ROWS, WIDTH)
    condition[:, 0] = factor * (1 + 0.1 * condition[:, 0])
    ids = rng.integers(0, VOCABULARY, ROWS).astype(np.int32)
    return params | {"layers": layers}, _exact(rng, ROWS, WIDTH), ids, condition


def begin(beginning: str, params: Any, x: Any, ids: Any) -> Any:
    if beginning == "product":
        return x @ params["embed"]
    return params["table"][ids] if beginning == "table" else x


def program(name: str, depth: int, form: str, beginning: str, factor: float) -> Callable[..., Any]:
    """A model of equal layers, whose result is what the chain ends in."""
    layer = lambda p, h, c: LAYERS[name](p, h, c, factor)

    def model(params: Any, x: Any, ids: Any, c: Any) -> Any:
        h = begin(beginning, params, x, ids)
        if form == "scanned":
            return lax.scan(lambda h, p: (layer(p, h, c), None), h, params["layers"])[0]
        for p in params["layers"]:
            h = layer(p, h, c)
        return h

    return model


def unstacked(params: Any) -> Any:
    """The parameters of each layer as arrays of their own, as in a model that is written out."""
    depth = len(params["layers"]["w"])
    rows = [{k: v[i] for k, v in params["layers"].items()} for i in range(depth)]
    return {**params, "layers": rows}


@dataclasses.dataclass(frozen=True)
class Chain:
    """One chain; the factor is what branches are scaled by, or how far factors are from 1."""

    name: str
    factor: float
    depth: int
    beginning: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}, {self.factor:g}, {self.depth} layers, {self.beginning}, {self.dtype}"

    def found(self, form: str) -> float:
        """The error of `autocast`."""
        policy = Policy(self.dtype)
        return self._error(
            interpreted(
                _cast(self.name, self.depth, form, self.beginning, self._text(), policy),
                _arguments(self.depth, self.factor, form),
            )
        )

    @property
    def bound(self) -> float:
        return BOUND if self.name in SUMS else ONE_ROUNDING

    def _text(self) -> float:
        return self.factor if self.name in LITERAL else 1.0

    def _error(self, results: Sequence[Any]) -> float:
        exact = _exactly(self.name, self.depth, self.beginning, self._text(), self.factor)
        first = 0.0
        if self.name in SUMS:
            params, x, ids, _ = arguments(self.depth, self.factor)
            first = np.asarray(begin(self.beginning, params, x, ids), np.float64)
        added = exact - first
        away = as_numbers(results[0]).astype(np.float64) - exact
        return float(np.linalg.norm(away) / np.linalg.norm(added))


@functools.lru_cache(maxsize=64)
def _arguments(depth: int, factor: float, form: str) -> Any:
    params, *data = arguments(depth, factor)
    return (params if form == "scanned" else unstacked(params), *data)


@functools.lru_cache(maxsize=256)
def _exactly(name: str, depth: int, beginning: str, text: float, factor: float) -> Any:
    """The result in float64, of the float32 program."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: a.astype(np.float64) if a.dtype.kind == "f" else a,
            _arguments(depth, factor, "scanned"),
        )
        fn = program(name, depth, "scanned", beginning, text)
        return np.asarray(interpreted(jax.jit(fn).trace(*wide), wide)[0])


@functools.lru_cache(maxsize=64)
def _cast(name: str, depth: int, form: str, beginning: str, text: float, policy: Policy) -> Any:
    fn = program(name, depth, form, beginning, text)
    cast = autocast(fn, policy=policy, params=(0,))
    return jax.jit(cast).trace(*_arguments(depth, 1.0, form))


def errors(chain: Chain, forms: Sequence[str]) -> dict[str, float]:
    """Returns the error of `autocast` in each form."""
    with jax_settings(False), np.errstate(all="ignore"):
        return {form: chain.found(form) for form in forms}
