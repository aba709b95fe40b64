"""Calls that trace and compile again what they did before warn once, with the line to write."""

import itertools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import BF16, autocast, cast_params, check_numerics, explain
from jmp_autocast.call import repeats
from jmp_autocast.integrations import nnx as nnx_integration

X = np.ones((2, 8), np.float32)
W = np.ones((8, 8), np.float32)


def layer(w, x):
    return jnp.tanh(x @ w)


@pytest.fixture(autouse=True)
def ticks(monkeypatch):
    """A clock on which each call takes 0.04 s: two repeats are within the limit."""
    monkeypatch.setattr(repeats, "LIMIT", 0.1)
    count = itertools.count()
    monkeypatch.setattr(repeats, "clock", lambda: next(count) * 0.04)


def said(fn, calls, *args):
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(calls):
            fn(*args)
    # JAX's frames are between ours and the user's where JAX differentiates.
    assert all(warning.filename.endswith((__file__, "api_util.py")) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_the_third_repeat_is_too_much_and_is_said_once():
    low = autocast(layer, policy=BF16)
    assert said(low, 3, W, X) == []
    (text,) = said(low, 5, W, X)
    assert "layer was called 4 times outside of jit with arguments of the same types" in text
    assert "the repeats took 0.12 s. Write fn = jax.jit(autocast(layer))." in text
    assert said(autocast(layer, policy=BF16), 5, W, X) == []  # the same wrapper


@nnx.jit
def nnx_layer(model, x):
    return model(x)


LINES = {
    "jax.jit": (autocast(jax.jit(layer), policy=BF16), "layer)), with jax.jit outside of autocast"),
    "eqx.filter_jit": (autocast(eqx.filter_jit(layer), policy=BF16), "with eqx.filter_jit outside"),
}


@pytest.mark.parametrize(("fn", "line"), LINES.values(), ids=LINES)
def test_a_jit_inside_belongs_outside(fn, line):
    (text,) = said(fn, 6, W, X)
    assert line in text


def test_nnx():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    (text,) = said(nnx_integration.autocast(nnx_layer, policy=BF16), 6, model, X)
    assert "fn = nnx.jit(autocast(nnx_layer)), with nnx.jit outside of autocast, not inside" in text


def other_types(fn):
    sizes = itertools.count(1)
    return lambda w, x: fn(w, np.ones((next(sizes), 8), np.float32))


def of_a_new_function(fn):
    return lambda w, x: autocast(lambda w, x: layer(w, x), policy=BF16)(w, x)


SILENT = {
    "jit": jax.jit,
    "jit of a gradient": lambda fn: jax.jit(jax.grad(lambda w, x: fn(w, x).sum())),
    "abstract": lambda fn: lambda w, x: jax.eval_shape(fn, w, x),
    "closed over": lambda fn: lambda w, x: jax.jit(lambda: fn(W, X))(),
    "other types": other_types,
    "new functions": of_a_new_function,
    "explain": lambda fn: lambda w, x: explain(fn, w, x),
    "check_numerics": lambda fn: lambda w, x: check_numerics(fn)(w, x),
    "cast_params": lambda fn: lambda w, x: cast_params(fn, w, x),
}


@pytest.mark.parametrize("around", SILENT.values(), ids=SILENT)
def test_what_is_no_repeat_is_silent(around):
    fn = autocast(lambda w, x: layer(w, x), policy=BF16)
    with jax.check_tracer_leaks(False):
        assert said(around(fn), 6, W, X) == []


def test_who_disables_jit_is_told_nothing():
    fn = autocast(lambda w, x: layer(w, x), policy=BF16)
    with jax.disable_jit():
        assert said(fn, 6, W, X) == []
