"""A name decides nothing: other names of arguments and keys give the program the same dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast
from tests.support.jaxprs import dtypes, equations, trace

X = np.ones((4, 8), np.float32)
WORDS = (
    "params model weights state_dict batch inputs labels stats carry x y w b kernel bias scale "
    "image mask variables non_trainable key a q theta"
).split()
W, B = np.eye(8, dtype=np.float32), np.ones(8, np.float32)


def mlp(params, batch):
    h = jax.nn.gelu(batch["x"] @ params["w"] + params["b"]) * params["scale"]
    return jnp.mean((h @ params["v"] + params["b"] - batch["y"]) ** 2)


def attention(params, batch):
    q, k = batch["x"] @ params["q"], batch["x"] @ params["k"]
    return jax.nn.softmax(q @ k.T) @ (batch["x"] + params["b"])


def recurrent(params, carry, batch):
    def step(h, x):
        return jnp.tanh(x @ params["w"] + h @ params["v"] + params["b"]), h

    return jax.lax.scan(step, carry["h"], batch["x"])


def without_products(params, batch):
    return jnp.exp(batch["x"] * params["scale"] + params["b"])


def normalized(params, batch):
    w = params["w"] / jnp.linalg.norm(params["w"], axis=0)
    return jax.nn.relu(jnp.tanh(batch["x"] @ w + params["b"]) @ w + params["b"])


BATCH = {"x": X, "y": 1 + X}
PARAMS = {"w": W, "v": W, "b": B, "scale": B}
PROGRAMS = {
    "MLP": (mlp, PARAMS, BATCH),
    "its gradient": (jax.grad(mlp), PARAMS, BATCH),
    "attention": (attention, {"q": W, "k": W, "b": B}, BATCH),
    "recurrent": (recurrent, PARAMS, {"h": X}, {"x": np.stack([X, X])}),
    "without products": (without_products, PARAMS, BATCH),
    "normalized weights": (normalized, PARAMS, BATCH),
}


def renamed(tree, rng):
    """A tree with other keys, and the function that gives it its own ones back."""
    if not isinstance(tree, dict):
        return tree, lambda other: other
    keys = dict(zip(tree, rng.permutation(WORDS)[: len(tree)].tolist(), strict=True))
    inner = {key: renamed(value, rng) for key, value in tree.items()}

    def back(other):
        return {key: inner[key][1](other[keys[key]]) for key in tree}

    return {keys[key]: inner[key][0] for key in tree}, back


def computed_in(fn, args, level):
    jaxpr = trace(autocast(fn, Policy(jnp.bfloat16, level=level), output_dtype="computed"), *args)
    return [(e.primitive.name, dtypes(e.invars), dtypes(e.outvars)) for e in equations(jaxpr)]


@pytest.mark.parametrize(("fn", "args"), [(p[0], p[1:]) for p in PROGRAMS.values()], ids=PROGRAMS)
@pytest.mark.parametrize("level", ["o1", "compute"])
@pytest.mark.usefixtures("standard_promotion")
def test_other_names_give_the_same_dtypes(fn, args, level):
    expected, rng = computed_in(fn, args, level), np.random.default_rng(0)
    for _ in range(3):
        others, backs = zip(*(renamed(arg, rng) for arg in args), strict=True)
        names = ", ".join(rng.permutation(WORDS)[: len(args)])
        program = eval(
            f"lambda {names}: fn(*(back(arg) for back, arg in zip(backs, ({names},))))",
            {"fn": fn, "backs": backs, "zip": zip},
        )
        assert computed_in(program, others, level) == expected
