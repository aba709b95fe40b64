"""The wrapper among optax's other transformations: what it hands on, and what it holds back.

PyTorch's tests of GradScaler train with clipping, penalties, accumulation, several optimizers and
fused ones; here each is an inner transformation, or a program of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jmp_autocast import (
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
    static_loss_scaling,
)
from jmp_autocast.loss_scaling import loss_scale, step_skipped
from tests.support.loss_scale_runs import (
    assert_trees_close,
    batches,
    control_run,
    last,
    model_loss,
    model_params,
    scaled_run,
)

# Most of optax needs it.
pytestmark = pytest.mark.usefixtures("standard_promotion")


INNER = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.05, weight_decay=0.1, mu_dtype=jnp.bfloat16),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=4),
    "schedule_free": contrib.schedule_free_adamw(0.05),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.05), 3),
    "MultiSteps": optax.MultiSteps(optax.adam(0.05), 2),
    "partition": optax.partition(
        {"a": optax.adam(0.05), "b": optax.set_to_zero()}, {"w1": "a", "b1": "b", "w2": "a"}
    ),
}


def plain(tree):
    """PRNG keys as integers, and the bfloat16 momentum of adamw as float32."""

    def plain_leaf(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(leaf))
        return leaf.astype(np.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(plain_leaf, tree)


@pytest.mark.parametrize("name", INNER)
def test_inner_transformations_run_as_without_the_wrapper(name):
    """One bad batch among six: what remains is the run over the other five, states included."""
    inner, data = INNER[name], batches(6, bad=[2])
    tx = dynamic_loss_scaling(inner, growth_interval=2)
    params, state = scaled_run(tx, model_params(), data)
    expected = control_run(inner, model_params(), np.delete(data, 2, axis=0))
    actual, expected = plain((params, state.inner_state)), plain(expected)
    for leaf in jax.tree.leaves(actual):
        np.testing.assert_array_equal(leaf[2], leaf[1])
    tolerances = {"rtol": 1e-3, "atol": 1e-4} if name == "adamw" else {"rtol": 1e-5, "atol": 1e-5}
    assert_trees_close(last(actual), last(expected), **tolerances)
    assert state.loss_scale.scale.tolist() == [2.0**n for n in (16, 17, 16, 16, 17, 17)]


def test_masked_parts_are_neither_unscaled_nor_checked():
    tx = optax.masked(dynamic_loss_scaling(optax.sgd(1.0), init_scale=8.0), {"a": True, "b": False})
    params = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    grads = {"a": np.full(2, 8, np.float32), "b": np.full(2, np.inf, np.float32)}
    updates, state = jax.jit(lambda: tx.update(grads, tx.init(params), params))()
    assert updates["a"].tolist() == [-1.0, -1.0]
    assert np.isinf(updates["b"]).all()
    assert not step_skipped(state)


SEARCHES = {
    "lbfgs": optax.lbfgs(memory_size=2),
    "backtracking": optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)
    ),
    "polyak_sgd": optax.polyak_sgd(),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_extra_arguments_reach_line_searches_unscaled(name):
    """The run is that without a scale: value, grad and value_fn have true values inside."""
    inner = SEARCHES[name]
    tx = static_loss_scaling(inner, 2.0**10)
    x = batches(1)[0]

    def run(tx, gradient):
        def step(carry, bad):
            params, state = carry
            fn = lambda params: model_loss(params, x)
            value, grads = gradient(fn, state, params)
            scaled = jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), grads)
            updates, state = tx.update(scaled, state, params, value=value, grad=scaled, value_fn=fn)
            carry = optax.apply_updates(params, updates), state
            return carry, (value, carry)

        def scan(params, bad):
            return jax.lax.scan(step, (params, tx.init(params)), bad)[1]

        return jax.jit(scan)

    plain = run(inner, lambda fn, state, params: jax.value_and_grad(fn)(params))
    scaled = run(tx, lambda fn, state, params: scaled_value_and_grad(fn)(state, params))
    values, (params, state) = jax.device_get(plain(model_params(), np.zeros(4, bool)))
    bad = np.array([0, 0, 1, 0, 0], bool)
    others, (other, wrapped) = jax.device_get(scaled(model_params(), bad))
    assert values[-1] < 0.5 * values[0]
    np.testing.assert_allclose(np.delete(others, 2), values, rtol=1e-5)
    assert_trees_close(last(other), last(params), rtol=1e-4, atol=1e-5)
    assert_trees_close(last(wrapped.inner_state), last(state), rtol=1e-3, atol=1e-4)
    for leaf in jax.tree.leaves((other, wrapped.inner_state)):
        np.testing.assert_array_equal(leaf[2], leaf[1])


READERS = [loss_scale, step_skipped, skipped_steps]
WRAPPED = dynamic_loss_scaling(optax.sgd(0.5), init_scale=8.0)
LABELS = {"a": "x", "b": "y"}

NESTINGS = {
    "bare": WRAPPED,
    "static": static_loss_scaling(optax.sgd(0.5), 8.0),
    "chain": optax.chain(optax.identity(), WRAPPED, optax.scale(1.0)),
    "named_chain": optax.named_chain(("first", optax.identity()), ("scaled", WRAPPED)),
    "masked": optax.masked(WRAPPED, {"a": True, "b": True}),
    "partition": optax.partition({"x": WRAPPED, "y": optax.set_to_zero()}, LABELS),
    "MultiSteps": optax.MultiSteps(WRAPPED, 1).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(WRAPPED, 0),
    "inject_hyperparams": optax.inject_hyperparams(
        dynamic_loss_scaling, static_args=("inner", "axis_name")
    )(optax.sgd(0.5), init_scale=8.0),
}


@pytest.mark.filterwarnings("ignore:.* is (around|before) the loss scaling:UserWarning")
@pytest.mark.parametrize("nesting", NESTINGS)
def test_all_nestings(nesting):
    tx = NESTINGS[nesting]
    params = {"a": np.ones(2, np.float32), "b": np.ones([], np.float32)}

    @jax.jit
    def run(bad):
        state = tx.init(params)
        _, after = tx.update(bad, state, params)
        return [[read(s) for read in READERS] for s in (state, after)]

    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        before, after = run({"a": np.array([1, np.nan], np.float32), "b": params["b"]})
    assert [leaf.dtype for leaf in before] == [jnp.float32, bool, jnp.int32]
    assert [leaf.item() for leaf in before] == [8.0, False, 0]
    assert [leaf.item() for leaf in after] == [8.0 if nesting == "static" else 4.0, True, 1]
