"""float16 training of NNX and Equinox models in two lines, and errors that name them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_autocast
from jmp_autocast import autocast, dynamic_loss_scaling, select_on_finite, step_skipped
from jmp_autocast.integrations import equinox, nnx as integration

pytestmark = pytest.mark.usefixtures("as_users_run_it")

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(nnx.gelu(self.norm(self.dense(x))))


def nnx_loss(net, x):
    return jnp.mean((net(x) - 1) ** 2)


def leaves(net, *kinds):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(net, *kinds))]


def test_an_nnx_step_that_is_skipped_changes_no_statistics():
    net = Net(nnx.Rngs(0))
    tx = dynamic_loss_scaling(optax.adam(0.1), init_scale=256.0)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    half = integration.autocast(nnx_loss, compute_dtype=jnp.float16)
    step = nnx.jit(integration.train_step(half))
    for x, skipped in ((X, False), (X * np.inf, True), (X, False)):
        before, drawn = leaves(net, nnx.Not(nnx.RngState)), leaves(net, nnx.RngCount)
        loss = step(optimizer, net, x)
        assert bool(step_skipped(optimizer)) == skipped
        assert bool(jnp.isfinite(loss)) != skipped
        after = leaves(net, nnx.Not(nnx.RngState))
        same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
        assert all(same) if skipped else not any(same)
        assert leaves(net, nnx.RngCount) != drawn
    assert net.calls[...] == 2


def test_nnx_gradients_are_those_of_the_scaled_loss():
    net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    loss = lambda net, x, power: (jnp.mean(net(x) ** power), {"x": x})
    expected = nnx.grad(loss, has_aux=True)(net, X, 2)[0]
    found = integration.scaled_value_and_grad(loss, has_aux=True)(64.0, net, X, 2)
    ((value, aux), grads) = found
    np.testing.assert_allclose(value, loss(net, X, 2)[0])
    np.testing.assert_array_equal(aux["x"], X)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one / 64, other, rtol=1e-6)


class Normed(eqx.Module):
    mlp: eqx.nn.MLP
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(4, 4, 8, 1, activation=jnp.tanh, key=key)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.mlp(x), state)


def test_equinox_in_two_lines():
    net, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    tx = dynamic_loss_scaling(optax.adam(0.1), init_scale=256.0)
    opt_state = tx.init(eqx.filter(net, eqx.is_inexact_array))

    @autocast(compute_dtype=jnp.float16)
    def loss(net, state, x):
        mapped = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = mapped(x, state)
        return jnp.mean((out - 1) ** 2), state

    @eqx.filter_jit
    def step(net, state, opt_state, x):
        fn = equinox.scaled_value_and_grad(loss, has_aux=True)
        (value, new), grads = fn(opt_state, net, state, x)
        net, opt_state = equinox.apply_gradients(tx, grads, opt_state, net)
        return net, select_on_finite(~step_skipped(opt_state), new, state), opt_state, value

    for x, skipped in ((X, False), (X * np.inf, True), (X, False)):
        before = jax.tree.leaves(eqx.filter((net, state), eqx.is_array))
        net, state, opt_state, _ = step(net, state, opt_state, x)
        after = jax.tree.leaves(eqx.filter((net, state), eqx.is_array))
        same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
        assert bool(step_skipped(opt_state)) == skipped
        assert all(same) if skipped else not all(same)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Net(nnx.Rngs(0)), "integrations.nnx.scaled_value_and_grad"),
        (
            eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0)),
            "integrations.equinox.scaled_value_and_grad",
        ),
    ],
    ids=["nnx", "equinox"],
)
def test_the_plain_function_names_the_integration(model, name):
    with pytest.raises(TypeError, match=name):
        jmp_autocast.scaled_value_and_grad(lambda model, x: 0.0 * x.sum())(8.0, model, X)
