"""The scenarios of PyTorch's tests of GradScaler, one test each, named in the docstring."""

# Not here: test_grad_scaling_unscale_sparse and test_grad_scaling_device_as_key, for JAX has
# neither sparse gradients nor a tensor that lives on one of several devices by itself;
# test_grad_scaler_deprecated_warning. Elsewhere: the moves of the scale, on 10,000 patterns against
# a model of PyTorch's, are in test_state_machine.py, with its overflow and its bounds
# (test_grad_scaling_update_scale, test_grad_scale_will_not_overflow); states that were saved in
# test_checkpoint.py (test_grad_scaling_state_dict); compiling once in test_compiled.py
# (test_graph_grad_scaling); accumulation in test_chains.py; several devices in test_sharded.py.

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    LossScale,
    dynamic_loss_scaling,
    scaled_value_and_grad,
)
from tests.support.loss_scale_runs import (
    assert_trees_equal,
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax.adam needs it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_unscale(dtype):
    """test_grad_scaling_unscale: contiguous, transposed and sliced leaves of several widths."""

    @jax.jit
    def unscale(leaf, sliced, other):
        leaves = [leaf, leaf.T, sliced[:, ::2], other]
        return LossScale.static(4.0).unscale(leaves)

    good = [np.full((4, 4), 4, dtype), np.full((4, 8), 4, dtype), np.full((4, 4), 4, np.float16)]
    grads, finite = unscale(*good)
    assert finite
    for leaf in grads:
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, 1.0)
    for position in range(3):
        for bad in (np.inf, np.nan):
            leaves = [leaf.copy() for leaf in good]
            leaves[position][2, 2] = bad
            assert not unscale(*leaves)[1]
    leaves = [leaf.copy() for leaf in good]
    leaves[1][2, 3] = np.inf  # cut off by the slice
    assert unscale(*leaves)[1]


def test_scale():
    """test_grad_scaling_scale: several losses, each multiplied with the scale."""
    losses = {"a": lambda w: 4.0 * w, "b": (lambda w: 2.0 * w, [lambda w: -w])}
    scale = LossScale.dynamic(8.0)
    grads = jax.tree.map(lambda fn: scaled_value_and_grad(fn)(scale, 1.0)[1], losses)
    assert jax.device_get(grads) == {"a": 32.0, "b": (16.0, [-8.0])}
    device = jax.devices()[3]
    state = jax.device_put(scale, device)
    value, grad = scaled_value_and_grad(losses["a"])(state, jax.device_put(1.0, device))
    assert value.devices() == grad.devices() == {device}


def test_pickle():
    """test_pickle_gradscaler."""
    tx = dynamic_loss_scaling(optax.adam(0.1), init_scale=3.0)
    state = pickle.loads(pickle.dumps(tx.init(jnp.ones(2))))
    assert float(scaled_value_and_grad(lambda w: 4.0 * w)(state, 1.0)[1]) == 12.0
    leaves, structure = jax.tree.flatten(state)
    assert_trees_equal(jax.tree.unflatten(structure, leaves), state)


def test_pass_itself():
    """test_grad_scaler_pass_itself: an optimizer can have the scale and the flag."""

    def update(updates, state, params=None, *, scale, finite, **_):
        return jax.tree.map(lambda g: jnp.where(finite, -g / scale, 0.0), updates), state

    wants = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

    @jax.jit
    def step(params):
        state = LossScale.dynamic(8.0)
        _, grads = scaled_value_and_grad(lambda w: jnp.sum(2.0 * w))(state, params)
        _, finite = state.unscale(grads)
        fused, _ = wants.update(grads, wants.init(params), scale=state.scale, finite=finite)
        tx = dynamic_loss_scaling(wants, init_scale=8.0)
        wrapped, _ = tx.update(grads, tx.init(params), params, scale=1.0, finite=finite)
        return fused, wrapped

    for updates in step(np.ones(2, np.float32)):
        assert updates.tolist() == [-2.0, -2.0]
