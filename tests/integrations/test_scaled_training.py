"""float16 training of NNX and Equinox models in two lines, and errors that name them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_autocast
from jmp_autocast import autocast, dynamic_loss_scaling
from jmp_autocast.integrations import equinox, nnx as integration
from jmp_autocast.loss_scaling import step_skipped
from tests.support import equinox_models
from tests.support.nnx_models import X, loss_fn, new_net

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def leaves(net, *kinds):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(net, *kinds))]


def test_an_nnx_step_that_is_skipped_changes_no_statistics():
    net = new_net()
    tx = dynamic_loss_scaling(optax.adam(0.1), init_scale=256.0)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    half = integration.autocast(loss_fn, jnp.float16)
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


def test_equinox_in_two_lines():
    key = jax.random.key(0)
    net, state = eqx.nn.make_with_state(equinox_models.Net)(key)
    tx = dynamic_loss_scaling(optax.adam(0.1), init_scale=256.0)
    opt_state = tx.init(eqx.filter(net, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(net, state, opt_state, x):
        half = autocast(equinox_models.loss_fn, jnp.float16)
        fn = equinox.scaled_value_and_grad(half, has_aux=True)
        (value, new), grads = fn(opt_state, net, state, x, key)
        net, opt_state = equinox.apply_gradients(tx, grads, opt_state, net)
        return net, optax.tree.where(step_skipped(opt_state), state, new), opt_state, value

    for x, skipped in ((X, False), (X * np.inf, True), (X, False)):
        before = jax.tree.leaves(eqx.filter((net, state), eqx.is_array))
        net, state, opt_state, _ = step(net, state, opt_state, x)
        after = jax.tree.leaves(eqx.filter((net, state), eqx.is_array))
        same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
        assert bool(step_skipped(opt_state)) == skipped
        assert all(same) if skipped else not all(same)


def test_the_plain_function_names_the_integration():
    with pytest.raises(TypeError, match=r"integrations\.equinox and \.nnx"):
        jmp_autocast.scaled_value_and_grad(lambda model, x: 0.0 * x.sum())(8.0, new_net(), X)
