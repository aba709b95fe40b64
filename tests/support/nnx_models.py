"""Flax NNX modules for the tests, and reading their state and programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_autocast.integrations.nnx import autocast

from .jaxprs import trace

HALF = {"float16": 2e-3, "bfloat16": 2e-2}  # a few roundings of a value of size one
bf16 = functools.partial(autocast, policy=jnp.bfloat16)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_in = nnx.LayerNorm(8, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm_out = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + self.norm_out(jax.nn.tanh(self.dense(self.norm_in(x))))


class Net(nnx.Module):
    """Batch statistics, dropout, a counter, a cache, and a shared layer."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.tied = self.head
        self.calls = nnx.Variable(jnp.array(0))
        self.cache = nnx.Cache(jnp.zeros((8, 8)))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.dense(x)
        self.cache[...] = jax.lax.dynamic_update_slice(self.cache[...], x, (0, 0))
        return self.tied(self.dropout(jax.nn.tanh(self.norm(x))))


def loss_fn(net, x):
    return jnp.mean(net(x) ** 2)


@functools.cache
def _net():
    key = jax.random.key(1, impl="unsafe_rbg")  # compiles fast
    return nnx.jit(lambda: Net(nnx.Rngs(params=0, dropout=key)))()


def new_net():
    return nnx.clone(_net())


X = np.random.default_rng(0).normal(size=(8, 8), scale=0.7).astype(np.float32)


def state_of(node):
    """All state as NumPy arrays, by path."""
    flat = nnx.to_flat_state(nnx.state(node))
    raw = [(path, leaf.get_raw_value()) for path, leaf in flat]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for _, x in raw]
    return {
        path: np.asarray(jax.random.key_data(x) if key else x)
        for (path, x), key in zip(raw, is_key, strict=True)
    }


def assert_same_state(got, want, tolerance):
    got, want = state_of(got), state_of(want)
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert got[path].dtype == value.dtype, path
        if value.dtype == np.float32:
            np.testing.assert_allclose(got[path], value, atol=tolerance, err_msg=str(path))
        else:
            np.testing.assert_array_equal(got[path], value, err_msg=str(path))


def jaxpr_of(fn, net, *args):
    """The jaxpr of a function of a module, as one of its state."""
    graphdef, state = nnx.split(net)
    return trace(lambda state, *args: fn(nnx.merge(graphdef, state), *args), state, *args)


@nnx.vmap
def stacked_blocks(rngs):
    return Block(rngs)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.layers = stacked_blocks(rngs.split(3))
        self.total = nnx.Variable(jnp.array(0.0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        self.total[...] += jnp.sum(x)
        return run(x, self.layers)


@functools.cache
def scanned():
    return nnx.jit(lambda: Scanned(nnx.Rngs(0)))()


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@functools.cache
def tower():
    return nnx.jit(lambda: Tower(nnx.Rngs(0)))()
