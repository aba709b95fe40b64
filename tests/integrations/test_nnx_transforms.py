"""Transformations of Flax NNX around and inside of its `autocast`; `test_nnx.py` has more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast.integrations.nnx import autocast
from tests.support.jaxprs import dot_dtypes
from tests.support.nnx_models import HALF, assert_same_state, jaxpr_of

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
XS = np.stack([X, 2 * X, -X])

bf16 = functools.partial(autocast, compute_dtype=jnp.bfloat16)


def plain(fn):
    return fn


class Block(nnx.Module):
    """Parameters, statistics, a stream of keys and a count."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.norm(jnp.tanh(self.dense(x))))


def loss(block, x):
    return jnp.mean(block(x) ** 2)


def with_aux(block, x):
    out = block(x)
    return jnp.mean(out**2), out


def scan_steps(cast):
    def step(block, x):
        return block, cast(loss)(block, x)

    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))


def scan_inside(block, xs):
    def step(block, x):
        return block, loss(block, x)

    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(block, xs)[1]


def fori(cast):
    def body(_, carry):
        block, x = carry
        return block, cast(block)(x)

    return lambda block: nnx.fori_loop(0, 2, body, (block, X))[1]


def switch(cast):
    branches = [cast(lambda b, x: b(x)), cast(lambda b, x: b(2 * x))]
    return lambda block: nnx.switch(1, branches, block, X)


# Each is what a cast function does with a block.
PROGRAMS = {
    "value_and_grad": lambda cast: lambda b: nnx.value_and_grad(cast(loss))(b, X),
    "value_and_grad with aux": lambda cast: (
        lambda b: nnx.value_and_grad(cast(with_aux), has_aux=True)(b, X)
    ),
    "autocast of value_and_grad": lambda cast: lambda b: cast(nnx.value_and_grad(loss))(b, X),
    "grad of some variables": lambda cast: (
        lambda b: nnx.grad(cast(loss), argnums=nnx.DiffState(0, nnx.PathContains("kernel")))(b, X)
    ),
    "jit around value_and_grad": lambda cast: (
        lambda b: nnx.jit(nnx.value_and_grad(cast(loss)))(b, X)
    ),
    "autocast of jit": lambda cast: lambda b: cast(nnx.jit(loss))(b, X),
    "remat": lambda cast: lambda b: nnx.grad(nnx.remat(cast(loss)))(b, X),
    "scan": lambda cast: lambda b: scan_steps(cast)(b, XS)[1],
    "autocast of scan": lambda cast: lambda b: cast(scan_inside)(b, XS),
    "fori_loop": fori,
    "switch": switch,
    "cond": lambda cast: lambda b: nnx.cond(True, cast(loss), lambda b, x: 0.0 * loss(b, x), b, X),
}


@functools.cache
def results():
    """What each program returns and leaves in its block, in 16 bits and in float32."""
    programs = {(n, c): p(c) for n, p in PROGRAMS.items() for c in (bf16, plain)}
    blocks = [Block(nnx.Rngs(0)) for _ in programs]
    run = nnx.jit(lambda blocks: [p(b) for p, b in zip(programs.values(), blocks, strict=True)])
    return dict(zip(programs, zip(run(blocks), blocks, strict=True), strict=True))


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("name", PROGRAMS)
def test_transformations(name):
    dots = {dot[0] for dot in dot_dtypes(jaxpr_of(PROGRAMS[name](bf16), Block(nnx.Rngs(0))))}
    assert dots == ({"bfloat16", "float32"} if name == "cond" else {"bfloat16"})
    (got, block), (want, exact) = results()[name, bf16], results()[name, plain]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        assert np.linalg.norm(g - w) <= 3 * HALF["bfloat16"] * (np.linalg.norm(w) + 0.03)
    assert block.calls[...] == exact.calls[...] > 0
    assert_same_state(block, exact, 3 * HALF["bfloat16"])


@pytest.mark.usefixtures("jit_caches")
def test_vmap_over_models():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Block(rngs)

    def run(cast):
        blocks = make(nnx.Rngs(0))
        out = nnx.jit(nnx.vmap(cast(lambda b, x: b(x)), in_axes=(0, 0)))(blocks, XS)
        return blocks, out

    (got, out), (want, expected) = run(bf16), run(plain)
    assert out.dtype == "float32"
    np.testing.assert_allclose(out, expected, atol=8 * HALF["bfloat16"])
    assert_same_state(got, want, 3 * HALF["bfloat16"])
    assert (got.calls[...] == 1).all()
