"""Training that goes wrong in silence: scales forgotten or misplaced, and endless skips."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    autocast,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    static_loss_scaling,
)
from jmp_autocast.loss_scaling import check_progress, check_step, consecutive_skips
from tests.support.jaxprs import find

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = np.full((4, 2), 0.5, np.float32)
CLIP = optax.clip_by_global_norm(0.1)


pytestmark = pytest.mark.usefixtures("as_users_run_it")


@autocast(policy=jnp.float16)
def loss(params, x):
    return jnp.mean((x @ params - 1.0) ** 2)


def training_step(tx, scaled=True):
    @jax.jit
    def step(params, opt_state, x):
        if scaled:
            value, grads = scaled_value_and_grad(loss)(opt_state, params, x)
        else:
            value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


@pytest.mark.filterwarnings("ignore:A transformation stands before:UserWarning")
@pytest.mark.parametrize(
    ("tx", "scaled", "wrong"),
    [
        (dynamic_loss_scaling(optax.sgd(0.1)), True, False),
        (dynamic_loss_scaling(optax.chain(CLIP, optax.adamw(0.1))), True, False),
        (dynamic_loss_scaling(optax.MultiSteps(optax.adam(0.1), 2)), True, False),
        (static_loss_scaling(optax.sgd(0.1), 8.0), True, False),
        # The scale is found where it fits: at 2**120 each gradient overflows.
        (dynamic_loss_scaling(optax.sgd(0.1), init_scale=2.0**31, max_scale=2.0**31), True, False),
        (dynamic_loss_scaling(optax.sgd(0.1)), False, True),
        (dynamic_loss_scaling(optax.adam(0.1)), False, True),
        (optax.chain(CLIP, dynamic_loss_scaling(optax.sgd(0.1))), True, True),
    ],
)
def test_a_step_must_not_depend_on_the_scale(tx, scaled, wrong):
    step, state = training_step(tx, scaled), tx.init(W)
    if wrong:
        with pytest.raises(ValueError, match=r"changes [\d.]+ times as much.*scaled_value"):
            check_step(step, jnp.array(W), state, X)
    else:
        check_step(step, jnp.array(W), state, X)


ORDERS = {
    "MultiSteps": (optax.MultiSteps(dynamic_loss_scaling(optax.sgd(0.1)), 2), "MultiSteps stands"),
    "apply_if_finite": (
        optax.apply_if_finite(dynamic_loss_scaling(optax.sgd(0.1)), 2),
        r"apply_if_finite stands around.*leave it out",
    ),
    "a clip before": (
        optax.chain(CLIP, dynamic_loss_scaling(optax.sgd(0.1))),
        r"stands before the loss scaling.*dynamic_loss_scaling\(optax.chain\(clip, optimizer\)\)",
    ),
    "masked": (
        optax.masked(optax.chain(CLIP, static_loss_scaling(optax.sgd(0.1), 8.0)), True),
        "stands before the loss scaling",
    ),
    "a clip after": (optax.chain(dynamic_loss_scaling(optax.sgd(0.1)), CLIP), None),
    "a clip inside": (dynamic_loss_scaling(optax.chain(CLIP, optax.sgd(0.1))), None),
}


@pytest.mark.parametrize(("tx", "message"), ORDERS.values(), ids=ORDERS)
def test_a_wrong_order_is_seen_in_the_state(tx, message):
    with warnings.catch_warnings(record=True, action="always") as caught:
        jax.eval_shape(training_step(tx), W, tx.init(W), X)
        loss_scale(((W, W), tx.init(W)))  # a pair of parameters and a state is no chain
    texts = [str(warning.message) for warning in caught]
    assert all(warning.filename == __file__ for warning in caught)
    assert len(texts) == (2 if message else 0)
    assert not message or all(re.search(message, text) for text in texts)


def test_check_step_says_when_no_step_is_made():
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    with pytest.raises(ValueError, match="skipped at every loss scale"):
        check_step(training_step(tx), W, tx.init(W), X * np.inf)


def test_check_step_says_when_a_step_changes_nothing():
    """Gradients of an unscaled loss that vanish in float16 are the same at each scale: zero."""
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    with pytest.raises(ValueError, match="changes nothing"):
        check_step(training_step(tx, scaled=False), W * 0, tx.init(W), X * 0)


def test_check_step_leaves_donated_arguments():
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    step = jax.jit(training_step(tx), donate_argnums=(0, 1))
    params, state = jnp.array(W), tx.init(W)
    check_step(step, params, state, X)
    assert not params.is_deleted()
    assert not state.loss_scale.scale.is_deleted()


@pytest.mark.parametrize(
    "make", [dynamic_loss_scaling, lambda tx, **o: static_loss_scaling(tx, 8.0, **o)]
)
def test_a_training_that_stands_still_is_reported(make):
    bad = X * np.inf
    scale = {"scale": 8.0} if make is static_loss_scaling else {}
    tx = make(optax.sgd(0.1), on_stuck="warn", stuck_after=2, **scale)
    step, params, state = training_step(tx), W, tx.init(W)
    for number, x in enumerate([bad, X, bad, bad, bad, bad]):
        with warnings.catch_warnings(record=True, action="always") as caught:
            params, state, _ = jax.block_until_ready(step(params, state, x))
            jax.effects_barrier()
        # After two skips in a row, and after two more.
        assert ["steps in a row" in str(w.message) for w in caught] == [True] * (number in (3, 5))
    assert consecutive_skips(state) == 4
    with pytest.raises(RuntimeError, match=r"4 steps in a row.*check_numerics"):
        check_progress(state, on_stuck="raise", stuck_after=4)
    check_progress(state, on_stuck="raise", stuck_after=5)


def test_a_training_that_stands_still_raises():
    tx = dynamic_loss_scaling(optax.sgd(0.1), on_stuck="raise", stuck_after=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="1 steps in a row were skipped"):
        jax.block_until_ready(training_step(tx)(W, tx.init(W), X * np.inf))
    with pytest.raises(ValueError, match="on_stuck must be"):
        dynamic_loss_scaling(optax.sgd(0.1), on_stuck="stop")
    with pytest.raises(ValueError, match="stuck_after must be"):
        dynamic_loss_scaling(optax.sgd(0.1), on_stuck="warn", stuck_after=0)


def test_nobody_pays_for_a_report_that_was_not_asked_for():
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    jaxpr = jax.make_jaxpr(tx.update)(W, tx.init(W))
    assert not jaxpr.effects
    assert not find(jaxpr, "debug_callback")


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adamw(0.1, weight_decay=0.5)])
def test_integer_parameters_stay_as_they_are(inner):
    """With allow_int=True their gradients are float0, which no optimizer of optax can add."""
    params = {"w": jnp.array(W), "n": jnp.array([2**30 + 1, 3]), "flag": jnp.array(True)}
    tx = dynamic_loss_scaling(inner)

    @jax.jit
    def step(params, opt_state):
        fn = lambda params: jnp.sum(params["w"] * params["n"] * params["flag"])
        _, grads = scaled_value_and_grad(fn, allow_int=True)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    after, state = step(params, tx.init(params))
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, params)
    assert after["n"].tolist() == [2**30 + 1, 3]
    assert bool(after["flag"])
    assert bool((after["w"] != W).all())
    assert loss_scale(state) == 2.0**16
