"""Equinox needs no adapter: its filtered transformations around and inside of `autocast`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast
from tests.support import equinox_models
from tests.support.jaxprs import dot_dtypes, trace
from tests.support.numerics import assert_trees_near

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
KEY = jax.random.key(0)
TOLERANCE = 3e-2

bf16 = functools.partial(autocast, policy=jnp.bfloat16)


def plain(fn):
    return fn


@functools.cache
def mlp():
    """With leaves that are no arrays: activations, sizes and flags."""
    return eqx.filter_jit(eqx.nn.MLP)(8, 3, 5, 2, activation=jnp.tanh, key=KEY)


@pytest.fixture(scope="module", autouse=True)
def models():
    """Made before anything is traced: they are constants of the programs."""
    mlp()


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


class Model(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, x):
        return self.mlp(x)

    def loss(self, x):
        return loss(self.mlp, x)


# Each is a program of a cast; the float32 one is that of `plain`.
PROGRAMS = {
    "filter_jit of autocast": lambda cast: eqx.filter_jit(cast(loss))(mlp(), X),
    "autocast of filter_jit": lambda cast: cast(eqx.filter_jit(loss))(mlp(), X),
    "filter_grad": lambda cast: eqx.filter_grad(cast(loss))(mlp(), X),
    "filter_value_and_grad": lambda cast: eqx.filter_value_and_grad(cast(loss))(mlp(), X),
    "a method": lambda cast: eqx.filter_grad(lambda m, x: cast(m.loss)(x))(Model(mlp()), X),
    "filter_vmap": lambda cast: eqx.filter_vmap(cast(mlp()))(X),
    "autocast of filter_vmap": lambda cast: cast(eqx.filter_vmap(mlp()))(X),
    "filter_checkpoint": lambda cast: eqx.filter_grad(eqx.filter_checkpoint(cast(loss)))(mlp(), X),
    "filter_jvp": lambda cast: eqx.filter_jvp(lambda x: cast(loss)(mlp(), x), (X,), (X,)),
    "filter_vjp": lambda cast: eqx.filter_vjp(cast(loss), mlp(), X)[1](jnp.float32(1)),
    "a part of a model": lambda cast: eqx.filter_grad(
        lambda m, x: jnp.mean(jax.vmap(lambda x: m.layers[1](cast(m.layers[0])(x)))(x) ** 2)
    )(mlp(), X),
}


def arrays(program, cast):
    """The program as a function of nothing that returns arrays alone."""
    return lambda: eqx.filter(program(cast), eqx.is_array)


@functools.cache
def results():
    """All programs in 16 bits and in float32, compiled together."""
    programs = {
        (name, cast): arrays(program, cast)
        for name, program in PROGRAMS.items()
        for cast in (bf16, plain)
    }
    found = jax.jit(lambda: [run() for run in programs.values()])()
    return dict(zip(programs, found, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_filtered_transformations(name):
    dots = {dot[0] for dot in dot_dtypes(trace(arrays(PROGRAMS[name], bf16)))}
    assert dots == ({"bfloat16", "float32"} if name == "a part of a model" else {"bfloat16"})
    assert_trees_near(results()[name, bf16], results()[name, plain], TOLERANCE)


def test_state_of_a_batch_norm():
    model, state = eqx.nn.make_with_state(equinox_models.Net)(KEY)

    def run(cast):
        grad = eqx.filter_value_and_grad(cast(equinox_models.loss_fn), has_aux=True)
        return eqx.filter_jit(grad)(model, state, X, KEY)

    ((value, new), grads), ((want, want_new), want_grads) = run(bf16), run(plain)
    assert_trees_near(value, want, TOLERANCE)
    assert_trees_near(new, want_new, TOLERANCE)
    assert_trees_near(grads.dense, want_grads.dense, TOLERANCE)
    assert not eqx.tree_equal(new, state)


def test_a_state_that_is_used_up():
    """Equinox refuses to take a used `State` apart, where autocast looks for lost changes."""
    linear = eqx.nn.Linear(8, 8, key=KEY)
    norm, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(linear, "weight", key=KEY)
    leaves, structure = jax.tree.flatten(state)
    results = []
    for around in (plain, bf16):
        call = around(lambda norm, x, state: norm(x, state))
        y, after = call(norm, X[0], jax.tree.unflatten(structure, leaves))
        assert isinstance(after, eqx.nn.State)
        results.append(y)
    np.testing.assert_allclose(results[1], results[0], atol=TOLERANCE)
