"""The scenarios of PyTorch's tests of GradScaler, one test each, named in the docstring."""

# Not here: test_grad_scaling_unscale_sparse and test_grad_scaling_device_as_key, for JAX has
# neither sparse gradients nor a tensor that lives on one of several devices by itself;
# test_grad_scaler_deprecated_warning; what needs several devices is in test_sharded.py.

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    LossScale,
    dynamic_loss_scaling,
    finite_value_and_grad,
    loss_scale,
    scaled_value_and_grad,
    skipped_steps,
)
from tests.support.loss_scale_runs import (
    assert_trees_equal,
    batches,
    last,
    model_params,
    scaled_run,
    scaled_step,
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


def test_update_scale():
    """test_grad_scaling_update_scale."""
    state = LossScale.dynamic(4.0, growth_interval=2, backoff_factor=0.25)
    seen = []
    for finite in (True, True, False):
        state = state.adjust(finite)
        seen.append((float(state.scale), int(state.good_steps)))
    assert seen == [(4.0, 1), (8.0, 0), (2.0, 0)]


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


@pytest.mark.parametrize("steps", [0, 3])
def test_state_dict(steps):
    """test_grad_scaling_state_dict (lazy and not): all fields arrive in another configuration."""
    source = LossScale.dynamic(
        64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5, max_scale=999.0
    )
    for _ in range(steps):
        source = source.adjust(True)
    saved = {name: np.asarray(value) for name, value in source._asdict().items()}
    loaded = LossScale.dynamic()._replace(**saved)
    for finite in (True, True, False, True):
        source, loaded = source.adjust(finite), loaded.adjust(finite)
        assert_trees_equal(loaded, source)


def test_pickle():
    """test_pickle_gradscaler."""
    tx = dynamic_loss_scaling(optax.adam(0.1), init_scale=3.0)
    state = pickle.loads(pickle.dumps(tx.init(jnp.ones(2))))
    assert float(scaled_value_and_grad(lambda w: 4.0 * w)(state, 1.0)[1]) == 12.0
    leaves, structure = jax.tree.flatten(state)
    assert_trees_equal(jax.tree.unflatten(structure, leaves), state)


def test_will_not_overflow():
    """test_grad_scale_will_not_overflow."""
    state = LossScale.dynamic(1e38, growth_factor=16.0, growth_interval=1, max_scale=3.4e38)
    for _ in range(3):
        state = state.adjust(True)
        assert float(state.scale) == float(np.float32(1e38))


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


def test_floor():
    """Ours: a run of bad steps leaves the scale at min_scale, and the state counts it."""
    tx = dynamic_loss_scaling(optax.adam(0.1), min_scale=4.0)
    params, state = last(scaled_run(tx, model_params(), batches(20, bad=range(20))))
    assert_trees_equal(params, model_params())
    assert float(loss_scale(state)) == 4.0
    assert int(skipped_steps(state)) == int(state.loss_scale.consecutive_skips) == 20


def test_lowering_the_interval_below_the_tracker():
    """Ours: PyTorch compares with ``==`` and would never grow again."""
    tx = dynamic_loss_scaling(optax.sgd(0.1), growth_interval=100)
    step = jax.jit(scaled_step(tx))
    params = jax.tree.map(jnp.asarray, model_params())
    state = tx.init(params)
    for n, x in enumerate(batches(6)):
        if n == 5:
            lowered = state.loss_scale._replace(growth_interval=jnp.int32(2))
            state = state._replace(loss_scale=lowered)
        params, state = step(params, state, x)
    assert float(loss_scale(state)) == 2.0**17
    assert step._cache_size() == 1


@pytest.mark.parametrize("gradient", [scaled_value_and_grad, finite_value_and_grad])
def test_a_float16_loss_does_not_overflow(gradient):
    """Ours: PyTorch's product of a float16 loss and the scale is float16."""

    def loss(w):
        return jnp.sum(w.astype(jnp.float16) * jnp.float16(1.5))

    out = gradient(loss)(LossScale.dynamic(2.0**16), jnp.array([2.0, 3.0]))
    if gradient is scaled_value_and_grad:
        value, grads = out
        np.testing.assert_array_equal(grads, 1.5 * 2.0**16)
    else:
        value = out.value
        assert out.finite
        np.testing.assert_array_equal(out.grads, 1.5)
    assert (value.dtype, float(value)) == (jnp.float16, 7.5)
