"""Recurrent cells, scanned, under autocast: PyTorch's ``test_autocast_rnn`` (check 10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from jmp_autocast import autocast
from tests.support.jaxprs import dot_dtypes, trace
from tests.support.torch_ops import normal


def tanh_cell(p, state, x):
    (h,) = state
    return (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]),)


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


FEATURES = 3
# A cell, the number of its states, and that of its gates.
CELLS = {"tanh": (tanh_cell, 1, 1), "lstm": (lstm_cell, 2, 4), "gru": (gru_cell, 1, 3)}


@pytest.mark.parametrize(("cell", "states", "gates"), CELLS.values(), ids=CELLS)
def test_values_and_gradients(cell, states, gates):
    """Each product is low; close to float32, with float32 gradients of everything."""
    params = {n: normal(FEATURES, gates * FEATURES, seed=2) for n in ("w", "u")}
    params["b"] = normal(gates * FEATURES, seed=1)
    hidden = tuple(normal(2, FEATURES, seed=20 + k) for k in range(states))
    args = params, hidden, normal(4, 2, FEATURES, seed=30)

    def loss(params, states, xs):
        step = lambda state, x: ((new := cell(params, state, x)), new[0])
        return jnp.sum(jnp.sin(lax.scan(step, states, xs)[1]))

    low = autocast(loss, compute_dtype="bfloat16")
    assert {dot[:2] for dot in dot_dtypes(trace(low, *args))} == {("bfloat16",) * 2}
    ours, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*args) for f in (low, loss))
    for got, true in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, true, atol=0.03 * float(jnp.abs(true).max()))
