"""A step is skipped by a conditional on a CPU, and by a selection on a TPU and a GPU."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import dynamic_loss_scaling, skipped_steps
from jmp_autocast.loss_scaling import loss_scale
from tests.support.loss_scale_runs import WAYS, bits, model_params, skipping_by

ADAM = dynamic_loss_scaling(optax.adam(1e-3))


def moving_everything():
    """An optimizer whose state holds every kind of array, and changes all of it in each step."""

    def init(params):
        return {
            "zero": jnp.float32(-0.0),
            "nan": jnp.array([0x7FC12345, 0xFFC54321], jnp.uint32).view(jnp.float32),  # payloads
            "tiny": jnp.float32(2.0**-149),
            "half": jnp.array([-0.0, 3.0], jnp.float16),
            "brain": jnp.array([-0.0, jnp.inf], jnp.bfloat16),
            "count": jnp.int32(7),
            "byte": jnp.arange(3, dtype=jnp.uint8),
            "flag": jnp.array([True, False]),
            "complex": jnp.array([complex(-0.0, np.nan)], jnp.complex64),
            "key": jax.random.key(3),
            "mean": jax.tree.map(jnp.zeros_like, params),
        }

    def update(updates, state, params=None):
        key, other = jax.random.split(state["key"])
        noise = jax.random.normal(other, ())
        added = {"half", "brain", "zero", "nan", "tiny", "complex"}
        new = {name: state[name] + jnp.ones_like(state[name]) for name in added}
        new |= {"count": state["count"] + 1, "byte": state["byte"] + jnp.uint8(1)}
        new |= {"flag": ~state["flag"], "key": key}
        new["mean"] = jax.tree.map(lambda m, u: 0.9 * m + u, state["mean"], updates)
        return jax.tree.map(lambda u: -0.1 * u + noise, updates), new

    return optax.GradientTransformation(init, update)


def one_step(params, state, grads, tx):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def by_scan(params, state, grads, tx):
    body = lambda carry, g: (one_step(*carry, g, tx), None)
    return jax.lax.scan(body, (params, state), jax.tree.map(lambda g: g[None], grads))[0]


def by_vmap(params, state, grads, tx):
    stacked = jax.tree.map(lambda leaf: leaf[None], (params, state, grads))
    step = jax.vmap(functools.partial(one_step, tx=tx))
    return jax.tree.map(lambda leaf: leaf[0], step(*stacked))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", [one_step, by_scan, by_vmap])
def test_a_skip_keeps_every_bit_of_every_kind_of_state(run, way):
    tx = dynamic_loss_scaling(moving_everything(), init_scale=4.0)
    params = {"w": jnp.array([-0.0, 2.0]), "b": jnp.float32(-0.0)}
    state = tx.init(params)
    with skipping_by(way):
        step = jax.jit(functools.partial(run, tx=tx))
        for bad in (np.nan, np.inf, -np.inf):
            grads = {"w": jnp.array([1.0, bad]), "b": jnp.float32(1)}
            after, skipped = step(params, state, grads)
            assert bits((after, skipped.inner_state)) == bits((params, state.inner_state))
            assert int(skipped_steps(skipped)) == 1
        moved, taken = step(params, state, jax.tree.map(jnp.ones_like, params))
    before, after = bits((params, state.inner_state))[1], bits((moved, taken.inner_state))[1]
    # A NaN plus one keeps its payload; all else has moved.
    same = [old for old, new in zip(before, after, strict=True) if old == new]
    assert same == bits(state.inner_state["nan"])[1]
    assert int(skipped_steps(taken)) == 0


def lowered(tx, platform):
    """The StableHLO of a step on a platform."""
    params = jax.tree.map(jnp.asarray, model_params())
    arguments = params, tx.init(params), params
    step = jax.jit(functools.partial(one_step, tx=tx), donate_argnums=(0, 1))
    return step.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


BRANCHING = re.compile(
    r"(%\d+) = stablehlo.convert %\d+ : \(tensor<i1>\) -> tensor<i32>\s+"
    r'%[\d:]+ = "stablehlo.case"\(\1\)'
)


def branches(text):
    """How many cases depend on a bool; those that depend on the platform are constants."""
    return len(BRANCHING.findall(text))


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("platform", "choices"), [("tpu", 0), ("cuda", 0), ("rocm", 0), ("cpu", 1)]
)
def test_where_a_conditional_costs_there_is_none(platform, choices):
    """A CPU has one around the optimizer."""
    text = lowered(ADAM, platform)
    assert branches(text) == choices
    # Donated: three parameters, two moments of each, the count and the nine fields of the scale.
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 3 + 6 + 1 + 9


def with_effect():
    """Calls back on each step that it runs."""
    return optax.stateless(lambda g, _: jax.tree.map(_reported, g))


def _reported(x):
    jax.debug.callback(CALLS.append, x)
    return x


CALLS = []


def with_loop():
    """Halves the gradient until it is small: with a NaN it would never end."""

    def halved(g):
        return jax.lax.while_loop(lambda g: ~(jnp.max(jnp.abs(g)) < 1), lambda g: g / 2, g)

    return optax.stateless(lambda g, _: jax.tree.map(jax.jit(halved), g))


@pytest.mark.parametrize(("make", "choices"), [(with_effect, 0), (with_loop, 0), (optax.sgd, 1)])
def test_an_optimizer_that_must_not_run_in_vain_has_a_conditional_everywhere(make, choices):
    tx = dynamic_loss_scaling(make(0.1) if make is optax.sgd else make())
    params = jnp.ones(2)
    program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert program.count("= platform_index[") == choices


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [with_effect, with_loop])
def test_such_an_optimizer_skips_a_bad_step(make, way):
    tx = dynamic_loss_scaling(make(), init_scale=1.0)
    params = jnp.ones(2)
    CALLS.clear()
    with skipping_by(way):
        step = jax.jit(functools.partial(one_step, tx=tx))
        after, state = step(params, tx.init(params), jnp.array([1.0, jnp.nan]))
        jax.effects_barrier()
        assert CALLS == []
        assert bits(after) == bits(params)
        step(params, state, jnp.array([0.5, 0.25]))
        jax.effects_barrier()
    assert len(CALLS) == (make is with_effect)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_makes_no_host_transfer(way):
    params = jnp.ones(2)
    good, bad = jnp.ones(2), jnp.array([1.0, jnp.inf])
    tx = dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9))
    with skipping_by(way):
        step = jax.jit(functools.partial(one_step, tx=tx))
        params, state = step(params, tx.init(params), good)
        with jax.transfer_guard("disallow"):
            params, state = step(params, state, bad)
            scale = loss_scale(state)
    assert (int(skipped_steps(state)), float(scale)) == (1, 2.0**15)


@pytest.mark.usefixtures("jit_caches")
def test_the_optimizer_is_traced_once():
    traces = []

    def update(updates, params):
        traces.append(updates)
        return updates

    tx = dynamic_loss_scaling(optax.stateless(update))
    params = jnp.ones(2)
    jax.jit(tx.update).trace(params, tx.init(params), params).lower()
    assert len(traces) == 1
