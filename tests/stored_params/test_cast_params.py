"""`cast_params`: which leaves a program reads in 16 bits alone, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import BF16, CastPolicy, Policy, autocast, cast_params
from jmp_autocast.integrations.nnx import autocast as nnx_autocast
from jmp_autocast.optimizers import as_float32
from tests.support.stored_params import assert_same_results

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
TOKENS = np.arange(6, dtype=np.int32) % 5

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def matrix(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 3


def scanned(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0]


def in_branches(p, x):
    low, full = (lambda w: x @ w), (lambda w: jnp.exp(w)[:4, :8] + x)
    return jax.lax.cond(x[0, 0] > 0, low, full, p["both"]) + jax.lax.cond(
        x[0, 0] > 0, low, lambda w: 2 * (x @ w.T), p["low"]
    )


# A program of the parameters w (8, 8) and x (4, 8), and the leaves that it reads in 16 bits alone.
A, B = matrix(1, 8, 8), matrix(2, 8, 8)
PROGRAMS = {
    "matmul and norm": (
        lambda p, x: (x / jnp.linalg.norm(x) * p["scale"]) @ p["w"],
        {"scale": A[0], "w": B},
        {"w"},
    ),
    "moved": (
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"]])[:8].T.reshape(8, 4),
        {"a": A[:2], "b": B[:2]},
        {"a", "b"},
    ),
    "comparison": (lambda p, x: jnp.sum(p["w"] > 0.1) + x @ p["w"], {"w": A}, set()),
    "returned": (lambda p, x: (x @ p["w"], p["w"].T), {"w": A}, set()),
    "unused": (lambda p, x: x @ p["w"], {"w": A, "no": matrix(2, 3)}, {"w"}),
    "embedding": (
        lambda p, x: jnp.take(p["e"], TOKENS, axis=0) @ p["w"] + p["tied"][TOKENS] @ p["tied"].T,
        {"e": A[:5], "w": B[:, :5], "tied": matrix(3, 5, 8)},
        {"e", "w", "tied"},
    ),
    "residual stream": (lambda p, x: (p["e"][TOKENS][:4] + x) @ p["w"], {"e": A, "w": B}, {"w"}),
    "scan over layers": (scanned, {"stack": matrix(1, 3, 8, 8)}, {"stack"}),
    "branches": (in_branches, {"both": A, "low": B}, {"low"}),
    "carried": (
        lambda p, x: jax.lax.fori_loop(
            0, 2, lambda _, c: (c[1], c[0], c[2] @ c[0]), (p["a"], p["b"], x)
        )[2],
        {"a": A, "b": B},
        set(),
    ),
    "sorted": (
        lambda p, x: x @ jax.lax.sort((p["k"], p["w"]), num_keys=1)[1],
        {"k": A, "w": B},
        set(),
    ),
    "cast by the program": (
        lambda p, x: x @ p["low"].astype(jnp.bfloat16) + x @ p["other"].astype(jnp.float16),
        {"low": A, "other": B},
        {"low", "other"},
    ),
}


def names_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True) for k, x in leaves if x.dtype != np.float32}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_leaves_that_are_read_in_16_bits_alone_are_cast(name):
    fn, params, low = PROGRAMS[name]
    small = cast_params(fn, params, X, policy=BF16)
    assert_same_results(autocast(fn, BF16), small, params, X)
    assert names_of(small) == low
    assert jax.tree.structure(small) == jax.tree.structure(params)


@pytest.mark.parametrize("level", ["tensor_cores", "compute"])
def test_the_policy_decides(level):
    def fn(p, x):
        with jax.named_scope("head"):
            out = x @ p["head"]
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["w"] + out

    params = {"w": matrix(1, 8, 8), "b": matrix(2, 8), "head": matrix(3, 8, 8)}
    policy = Policy(jnp.bfloat16, level=level).with_rules({"*": "float32"}, scope="head")
    low = {"w", "b"} if level == "compute" else {"w"}
    small = cast_params(fn, params, X, policy=policy)
    assert_same_results(autocast(fn, policy), small, params, X)
    assert names_of(small) == low
    none = BF16.with_rules({"dot_general": CastPolicy.FP32})
    assert not names_of(cast_params(lambda p, x: x @ p["w"], params, X, policy=none))


class Deep(nnx.Module):
    """Twelve layers, of which the tenth comes before the second by name, and a tied pair."""

    def __init__(self, rngs):
        layers = [nnx.Linear, nnx.LayerNorm] * 6
        self.layers = nnx.List(
            [kind(*(8,) * (2 if kind is nnx.Linear else 1), rngs=rngs) for kind in layers]
        )
        self.layers[2].kernel = self.layers[0].kernel
        self.scale = nnx.Param(jnp.float32(1 / 3))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * jnp.exp(self.scale[...])


def test_a_wrapper_of_modules_casts_the_leaves_that_the_plain_one_casts():
    module, call = Deep(nnx.Rngs(0)), lambda module, x: module(x)
    wrappers = autocast(call, policy=BF16), nnx_autocast(call, policy=BF16)
    stored = [cast_params(wrapper, module, X) for wrapper in wrappers]
    for wrapper, small in zip(wrappers, stored, strict=True):
        assert_same_results(wrapper, small, module, X)
    expected, found = ([x.dtype.name for x in jax.tree.leaves(small)] for small in stored)
    assert found == expected
    assert {"float32", "bfloat16"} == set(found)


def twice_alike(p, x):
    return x @ p["a"] @ p["b"].T


def twice_unlike(p, x):
    return x @ p["a"], jnp.exp(p["b"])


@pytest.mark.parametrize("fn", [twice_alike, twice_unlike])
def test_an_array_that_stands_twice(fn):
    shared = jnp.asarray(matrix(0, 8, 8))
    small = cast_params(fn, {"a": shared, "b": shared}, X, policy=BF16)
    alike = fn is twice_alike
    assert [x.dtype.name for x in small.values()] == [
        "bfloat16",
        "bfloat16" if alike else "float32",
    ]
    assert (small["a"] is small["b"]) == alike


def test_gradients_of_stored_parameters_are_those_of_the_program():
    fn, params, _ = PROGRAMS["embedding"]
    loss = autocast(lambda p, x: jnp.sum(fn(p, x) ** 2), policy=BF16)
    small = cast_params(loss, params, X)
    found = jax.jit(lambda p: jax.grad(loss)(as_float32(p), X))(small)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(jax.grad(loss))(params, X))


def test_a_program_that_returns_a_key():
    def fn(params, key, x):
        key, own = jax.random.split(key)
        return x @ params["w"] + jax.random.normal(own, (4,)), key

    params, key = {"w": jnp.ones((8, 4)) / 3}, jax.random.key(0)
    small = cast_params(fn, params, key, X, policy=BF16)
    assert_same_results(autocast(fn, BF16), small, params, key, X)
    assert small["w"].dtype == jnp.bfloat16
