"""PyTorch's tests of GradScaler that train a model, one test each, named in the docstring."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    LossScale,
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    select_on_finite,
    skipped_steps,
)
from tests.support.loss_scale_runs import (
    assert_trees_close,
    assert_trees_equal,
    batches,
    control_run,
    last,
    model_loss,
    model_params,
    scaled_run,
    scaled_step,
)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05, weight_decay=0.01),
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax.adam needs it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast(name):
    """test_grad_scaling_autocast (foreach, fused): four steps, the second one bad."""
    inner, data = OPTIMIZERS[name], batches(4, bad=[1])
    tx = dynamic_loss_scaling(inner, init_scale=128.0, growth_interval=1)
    step = jax.jit(scaled_step(tx, autocast(model_loss, compute_dtype=jnp.float16)))
    control = last(control_run(inner, model_params(), np.delete(data, 1, axis=0)))
    for round_trip in (False, True):
        params = model_params()
        state = jax.jit(tx.init)(params)
        for x in data:
            params, state = step(params, state, x)
            if round_trip:
                state = pickle.loads(pickle.dumps(state))
        assert float(loss_scale(state)) == 128.0 * 2.0**3 * 0.5
        assert_trees_close((params, state.inner_state), control, atol=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_fused_optimizers(name):
    """test_grad_scaling_autocast_fused_optimizers: unscaling by hand gives the same."""
    inner, data = OPTIMIZERS[name], batches(4, bad=[1])
    configuration = {"init_scale": 128.0, "growth_interval": 1}
    params, state = last(
        scaled_run(dynamic_loss_scaling(inner, **configuration), model_params(), data)
    )

    def by_hand(carry, x):
        params, inner_state, scale = carry
        _, grads = scaled_value_and_grad(model_loss)(scale, params, x)
        grads, finite = scale.unscale(grads)
        updates, new_state = inner.update(grads, inner_state, params)
        new = optax.apply_updates(params, updates), new_state
        old = params, inner_state
        return (*select_on_finite(finite, new, old), scale.adjust(finite)), None

    @jax.jit
    def run(params):
        start = params, inner.init(params), LossScale.dynamic(**configuration)
        return jax.lax.scan(by_hand, start, data)[0]

    other, inner_state, scale = run(model_params())
    assert_trees_equal(state.loss_scale, scale)
    assert_trees_close((params, state.inner_state), (other, inner_state), rtol=1e-6, atol=1e-9)
    counts = {int(count) for _, count in optax.tree.get_all_with_path(state, "count")}
    assert counts == (set() if name == "sgd" else {3})


def spoil(when):
    def update(updates, state, params=None):
        bad = jnp.where(state == when, jnp.nan, 0.0)
        return jax.tree.map(lambda g: g + bad, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_params_invalidated_between_unscale_and_step():
    """test_params_invalidated_with_grads_invalidated_between_unscale_and_step.

    What is chained before the wrapper is covered by the check. What goes wrong inside is the
    inner transformation's affair, which apply_if_finite looks after.
    """
    guarded = optax.chain(spoil(1), dynamic_loss_scaling(optax.sgd(0.1)))
    inside = dynamic_loss_scaling(optax.chain(spoil(1), optax.apply_if_finite(optax.sgd(0.1), 5)))
    for tx, skips in ((guarded, 1), (inside, 0)):
        params, state = scaled_run(tx, model_params(), batches(3))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        assert int(skipped_steps(last(state))) == skips


def test_clipping():
    """test_grad_scaling_clipping: scaled gradients clipped at max_norm * scale."""
    scale, max_norm = 128.0, 0.2
    before = optax.chain(
        optax.clip_by_global_norm(max_norm * scale),
        dynamic_loss_scaling(optax.sgd(1.0), init_scale=scale, min_scale=scale, max_scale=scale),
    )
    control = optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(1.0))
    data = batches(4)
    params, state = last(scaled_run(before, model_params(), data))
    expected, _ = last(control_run(control, model_params(), data))
    assert_trees_close(params, expected, rtol=1e-5, atol=1e-6)
    # An infinite norm clips to NaN, which the check sees.
    params, state = scaled_run(before, model_params(), batches(4, bad=[1]))
    assert int(skipped_steps(last(state))) == 1
    for leaf in jax.tree.leaves(params):
        np.testing.assert_array_equal(leaf[1], leaf[0])


def test_clipping_separate_unscale():
    """test_grad_scaling_clipping_separate_unscale: clipping inside the wrapper sees true norms."""
    seen = []

    def record(updates, state, params=None):
        jax.debug.callback(lambda norm: seen.append(float(norm)), optax.tree.norm(updates))
        return updates, state

    recorder = optax.GradientTransformation(lambda params: optax.EmptyState(), record)
    clipped = optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(1.0))
    tx = dynamic_loss_scaling(optax.chain(recorder, clipped), init_scale=128.0, growth_interval=1)
    data = batches(4, bad=[1])
    params, _ = scaled_run(tx, model_params(), data)
    jax.effects_barrier()
    expected, _ = control_run(clipped, model_params(), np.delete(data, 1, axis=0))
    assert_trees_close(last(params), last(expected), rtol=1e-5, atol=1e-6)

    @jax.jit
    @jax.vmap
    def true_norm(params, x):
        return optax.tree.norm(jax.grad(model_loss)(params, x))

    starts = jax.tree.map(
        lambda start, later: np.concatenate([start[None], later[:-1]]), model_params(), params
    )
    norms = np.asarray(true_norm(starts, data))
    assert not np.isfinite(norms[1])
    assert norms[0] > 0.2  # so that clipping has an effect
    # The optimizer did not even run on the bad batch.
    np.testing.assert_allclose(seen, norms[[0, 2, 3]], rtol=1e-5)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "float16"])
def test_penalty(low):
    """test_grad_scaling_penalty: a penalty on gradients that were scaled and unscaled again."""
    loss = autocast(model_loss, compute_dtype=jnp.float16) if low else model_loss

    def penalized(params, x):
        value, grads = scaled_value_and_grad(loss)(512.0, params, x)
        grads, _ = LossScale.static(512.0).unscale(grads)
        return value + jnp.square(optax.tree.norm(grads))

    def control(params, x):
        value, grads = jax.value_and_grad(model_loss)(params, x)
        return value + jnp.square(optax.tree.norm(grads))

    @jax.jit
    def both(params, x):
        value, grads = scaled_value_and_grad(penalized)(256.0, params, x)
        grads, finite = LossScale.static(256.0).unscale(grads)
        return finite, (value, grads), jax.value_and_grad(control)(params, x)

    finite, actual, expected = both(model_params(), batches(1)[0])
    assert finite
    tolerances = {"rtol": 1e-2, "atol": 2e-3} if low else {"rtol": 1e-5, "atol": 1e-6}
    assert_trees_close(actual, expected, **tolerances)


def test_multiple():
    """test_grad_scaling_multiple: two models and optimizers share a scale; one of them skips."""
    inners = [optax.sgd(0.1), optax.adam(0.1)]
    data = [batches(3), batches(3, bad=[1], seed=2)]

    def body(carry, xs):
        scale, models = carry
        finites, after = [], []
        for inner, (params, state), x in zip(inners, models, xs, strict=True):
            _, grads = scaled_value_and_grad(model_loss)(scale, params, x)
            grads, finite = scale.unscale(grads)
            updates, new_state = inner.update(grads, state, params)
            new = optax.apply_updates(params, updates), new_state
            after.append(select_on_finite(finite, new, (params, state)))
            finites.append(finite)
        finites = jnp.stack(finites)
        return (scale.adjust(finites.all()), after), finites

    @jax.jit
    def run(*models):
        start = [(p, inner.init(p)) for inner, p in zip(inners, models, strict=True)]
        return jax.lax.scan(body, (LossScale.dynamic(128.0, growth_interval=1), start), data)

    (scale, models), finites = run(model_params(0), model_params(1))
    assert np.asarray(finites).tolist() == [[True, True], [True, False], [True, True]]
    assert float(scale.scale) == 128.0 * 2 * 0.5 * 2
    assert int(scale.skipped_steps) == 1
    first = last(control_run(inners[0], model_params(0), data[0]))
    second = last(control_run(inners[1], model_params(1), data[1][[0, 2]]))
    assert_trees_close(models, [first, second], rtol=1e-4, atol=1e-5)


def test_found_inf_parity():
    """TestShardedGradScalerParityWithDDP.test_sharded_grad_scaler_found_inf, over a mapped axis.

    Ten steps of four workers, some with a bad batch on one of them, against one worker. The workers
    add their gradients in the optimizer, after the check.
    """

    def average(updates, state, params=None):
        return jax.lax.pmean(updates, "workers"), state

    averaging = optax.GradientTransformation(lambda params: optax.EmptyState(), average)
    inner = optax.sgd(0.1)
    many = dynamic_loss_scaling(
        optax.chain(averaging, inner), growth_interval=3, axis_name="workers"
    )
    data = batches(10).reshape(10, 4, 4, 4)
    for step, worker in {2: 0, 3: 3, 7: 1}.items():
        data[step, worker, 0, 0] = np.inf
    copies = jax.tree.map(lambda leaf: np.stack([leaf] * 4), model_params())
    step = jax.vmap(scaled_step(many), axis_name="workers")

    def body(carry, x):
        carry = step(*carry, x)
        return carry, carry

    @jax.jit
    def run(copies):
        return jax.lax.scan(body, (copies, jax.vmap(many.init)(copies)), data)[1]

    params, state = jax.device_get(run(copies))
    for leaf in jax.tree.leaves((params, state)):
        np.testing.assert_array_equal(leaf, leaf[:, :1].repeat(4, axis=1))
    single = dynamic_loss_scaling(inner, growth_interval=3)
    expected, expected_state = scaled_run(single, model_params(), data.reshape(10, 16, 4))
    first = jax.tree.map(lambda leaf: leaf[:, 0], (params, state.loss_scale))
    assert_trees_equal(first[1], expected_state.loss_scale)
    assert_trees_close(first[0], expected, rtol=1e-4, atol=1e-5)
    assert expected_state.loss_scale.skipped_steps[-1] == 3
