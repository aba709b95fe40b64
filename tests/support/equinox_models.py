"""An Equinox module with state and dropout, and its loss."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Net(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.dense = eqx.nn.Linear(8, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key):
        x, state = self.norm(self.dense(x), state)
        return self.dropout(x, key=key), state


def loss_fn(net, state, x, key):
    over = {"axis_name": "batch", "in_axes": (0, None, 0), "out_axes": (0, None)}
    out, state = jax.vmap(net, **over)(x, state, jax.random.split(key, len(x)))
    return jnp.mean(out**4), state
