"""Recurrent cells, scanned, under autocast: PyTorch's ``test_autocast_rnn`` (check 10)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from jmp_autocast import autocast
from tests.support.jaxprs import dot_dtypes, trace


def normal(shape, seed, dtype):
    values = np.random.default_rng(seed).normal(size=shape, scale=0.5)
    return jnp.asarray(values.astype(np.float32).astype(jnp.dtype(dtype)))


def tanh_cell(p, state, x):
    (h,) = state
    return (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]),)


def relu_cell(p, state, x):
    (h,) = state
    return (nn.relu(x @ p["w"] + h @ p["u"] + p["b"]),)


def lstm_cell(p, state, x):
    h, c = state
    i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, axis=-1)
    c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(c), c


def gru_cell(p, state, x):
    (h,) = state
    r, z, n = jnp.split(x @ p["w"] + p["b"], 3, axis=-1)
    s, y, m = jnp.split(h @ p["u"], 3, axis=-1)
    z = nn.sigmoid(z + y)
    return ((1 - z) * jnp.tanh(n + nn.sigmoid(r + s) * m) + z * h,)


CELLS = {"tanh": (tanh_cell, 1, 1), "relu": (relu_cell, 1, 1), "lstm": (lstm_cell, 2, 4)}
CELLS["gru"] = (gru_cell, 1, 3)
FEATURES = 3


def rnn(cell, layers, reverse):
    def run(params, states, xs):
        for layer, p in enumerate(params[:layers]):
            direction = reverse and layer % 2 == 1
            step = lambda state, x, p=p: ((new := cell(p, state, x)), new[0])
            last, xs = lax.scan(step, states, xs, reverse=direction)
        return xs, last

    return run


def rnn_arguments(n_states, gates, layers, dtypes):
    x_dtype, h_dtype, w_dtype = dtypes
    shapes = {"w": (FEATURES, gates * FEATURES), "u": (FEATURES, gates * FEATURES)}
    shapes["b"] = (gates * FEATURES,)
    params = [
        {n: normal(s, 7 * k + len(s), w_dtype) for n, s in shapes.items()} for k in range(layers)
    ]
    states = tuple(normal((2, FEATURES), 20 + k, h_dtype) for k in range(n_states))
    return params, states, normal((4, 2, FEATURES), 30, x_dtype)


MIXES = [("lstm", *mix) for mix in itertools.product(["float32", "bfloat16"], repeat=3)]
MIXES += [(name, "bfloat16", "float32", "float32") for name in ("tanh", "relu", "gru")]


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_rnn_dtypes(mix):
    """test_autocast_rnn on CUDA (check 10): inputs, hidden state and weights in any mix of dtypes.

    PyTorch returns 16 bits; here carries and outputs keep their types, and each product is low.
    """
    cell, n_states, gates = CELLS[mix[0]]
    args = rnn_arguments(n_states, gates, 2, mix[1:])
    unify = lambda p, state, x: cell(
        jax.tree.map(lambda w: w.astype(jnp.float32), p),
        [s.astype(jnp.float32) for s in state],
        x.astype(jnp.float32),
    )
    declared = lambda p, state, x: tuple(
        new.astype(old.dtype) for new, old in zip(unify(p, state, x), state, strict=True)
    )
    fn = rnn(declared, 2, reverse=True)
    wrapped = autocast(fn, compute_dtype="bfloat16")
    jaxpr = trace(wrapped, *args)
    assert dot_dtypes(jaxpr) == [("bfloat16",) * 3] * 4
    assert [v.aval for v in jaxpr.jaxpr.outvars] == [v.aval for v in trace(fn, *args).jaxpr.outvars]


@pytest.mark.parametrize("name", ["tanh", "lstm", "gru"])  # the gradient of relu jumps
def test_rnn_values_and_gradients(name):
    """test_autocast_rnn (check 10): close to float32, with float32 gradients of everything."""
    cell, n_states, gates = CELLS[name]
    args = rnn_arguments(n_states, gates, 1, ("float32",) * 3)
    loss = lambda *args: jnp.sum(jnp.sin(rnn(cell, 1, reverse=False)(*args)[0]))
    ours, want = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*args)
        for f in (autocast(loss, compute_dtype="bfloat16"), loss)
    )
    for got, true in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, true, atol=0.03 * float(jnp.abs(true).max()))
