"""A bad gradient anywhere, at any step, changes no bit of the parameters and of the inner state."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jmp_autocast import (
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
    static_loss_scaling,
)
from jmp_autocast.loss_scaling import loss_scale, step_skipped
from tests.support.loss_scale_runs import WAYS, bits, skipping_by

SCALE = 4.0

# Gradients by tree. Those of 8 bits belong to float32 parameters.
TREES = {
    "float16": {"w": "float16[3,2]", "b": "float16[2]"},
    "float64": ("float64[3]", "float64[2,2]"),
    "mixed": {
        "f": "float32[2]",
        "h": "float16[2,1]",
        "b": "bfloat16[3]",
        "z": "complex64[2]",
        "q": "float8_e5m2[2]",
        "r": "float8_e4m3fn[]",
        "empty": "float16[0,3]",
        "i": "int32[3]",
        "masked": optax.MaskedNode(),
        "none": None,
    },
}


# optax mixes widths where parameters have 16 bits.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def filled(spec, rng, *, parameter):
    """An array for a spec such as ``float16[3,2]``: quarters, and -0.0 among them."""
    name, shape = spec[:-1].split("[")
    shape = tuple(int(n) for n in shape.split(",") if n)
    if name.startswith("int"):
        return rng.integers(-3, 3, shape).astype(name)
    values = rng.integers(-8, 9, shape) / 4
    if name.startswith("complex"):
        values = values + 1j * rng.integers(-8, 9, shape) / 4
    dtype = "float32" if parameter and name.startswith("float8") else name
    values = np.array(values).astype(jnp.dtype(dtype))
    if parameter and values.size and not name.startswith("complex"):
        values.reshape(-1)[0] = -0.0
    return values


def tree_of(name, seed, *, parameter):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda spec: filled(spec, rng, parameter=parameter), TREES[name])


@functools.cache
def compiled(name, way):
    """``init`` and a training step, with momentum and a step count; integer leaves are frozen.

    They are compiled ahead of time, so that anything that would recompile raises an error.
    """
    with (
        jax.enable_x64(name == "float64"),
        jax.numpy_dtype_promotion("standard"),
        skipping_by(way),
    ):
        labels = jax.tree.map(
            lambda spec: "frozen" if spec.startswith("int") else "moving", TREES[name]
        )
        moving = optax.chain(optax.trace(0.5), optax.scale_by_schedule(lambda n: -0.5 / (n + 1)))
        inner = optax.partition({"moving": moving, "frozen": optax.set_to_zero()}, labels)
        tx = dynamic_loss_scaling(inner, init_scale=SCALE, min_scale=0.25, growth_interval=1000)

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, grads = (tree_of(name, 0, parameter=kind) for kind in (True, False))
        init = jax.jit(tx.init).lower(params).compile()
        return init, jax.jit(step).lower(params, jax.eval_shape(tx.init, params), grads).compile()


def good_gradients(name, seed):
    """Gradients times the scale; every product with it is exact in every dtype."""

    def scaled(leaf):
        exact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return (leaf * np.array(SCALE, leaf.dtype)).astype(leaf.dtype) if exact else leaf

    return jax.tree.map(scaled, tree_of(name, seed, parameter=False))


def bad_values(dtype):
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [complex(a, b) for a in (np.nan, np.inf, 1) for b in (-np.inf, np.nan)]
    has_infinity = dtype != ml_dtypes.float8_e4m3fn
    return [np.nan, *([np.inf, -np.inf] if has_infinity else [])]


def planted(grads):
    """The gradients with one bad value in the last element of one leaf, in each way."""
    leaves, structure = jax.tree.flatten(grads)
    for i, leaf in enumerate(leaves):
        if leaf.size and leaf.dtype.kind != "i":
            for value in bad_values(leaf.dtype):
                bad = np.array(leaf)
                bad.reshape(-1)[-1] = value
                yield jax.tree.unflatten(structure, [*leaves[:i], bad, *leaves[i + 1 :]])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TREES)
def test_a_planted_fault_changes_no_bit(name, way):
    init, step = compiled(name, way)
    with jax.enable_x64(name == "float64"):
        params = tree_of(name, 100, parameter=True)
        params, state = step(params, init(params), good_gradients(name, 0))
        good = good_gradients(name, 1)
        without = step(params, state, good)
        assert bits(without[0]) != bits(params)
        for bad in planted(good):
            after, skipped = step(params, state, bad)
            assert bits((after, skipped.inner_state)) == bits((params, state.inner_state))
            assert bool(step_skipped(skipped))
            assert int(skipped_steps(skipped)) == 1
            assert float(loss_scale(skipped)) == SCALE / 2
            # What follows is what would have followed without the bad step.
            with_fault = step(after, skipped._replace(loss_scale=state.loss_scale), good)
            assert bits(with_fault) == bits(without)


@pytest.mark.parametrize(
    "tree", [{}, None, [None, None], {"m": optax.MaskedNode()}, [jnp.zeros(0)]]
)
def test_trees_without_elements_are_finite(tree):
    tx = dynamic_loss_scaling(optax.trace(0.9))
    _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert not step_skipped(state)
    assert int(state.loss_scale.good_steps) == 1


def test_a_gradient_that_overflows_only_in_the_division_is_bad():
    """PyTorch checks before it multiplies and lets this one through."""
    tx = dynamic_loss_scaling(optax.sgd(1.0), init_scale=0.5, min_scale=0.25)
    params = jnp.ones(2)
    updates, state = jax.jit(tx.update)(jnp.array([1.0, 3e38]), tx.init(params), params)
    assert bool(step_skipped(state))
    assert bits(optax.apply_updates(params, updates)) == bits(params)


@functools.cache
def compiled_run(kind, loss_dtype):
    """Sixty steps from a given scale: parameters, skips, scales and losses after each."""
    inner = optax.sgd(0.1)
    tx = dynamic_loss_scaling(inner) if kind == "dynamic" else static_loss_scaling(inner, 8.0)

    def loss(params):
        return jnp.sum((params - 3.0) ** 2).astype(loss_dtype)

    def step(carry, _):
        params, state = carry
        value, grads = scaled_value_and_grad(loss)(state, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, step_skipped(state), loss_scale(state), value)

    def run(scale):
        params = jnp.array([1.0, -0.0])
        state = tx.init(params)
        state = state._replace(loss_scale=state.loss_scale._replace(scale=scale))
        return jax.lax.scan(step, (params, state), length=60)[1]

    return jax.jit(run).lower(np.float32(0)).compile()


@pytest.mark.parametrize("restored", [2.0**-140, 0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 3e38])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("loss_dtype", ["float32", "float16", "bfloat16"])
def test_a_restored_scale_of_any_value_never_gives_nan_parameters(restored, kind, loss_dtype):
    scale = np.float32(restored)
    params, skipped, scales, losses = map(np.asarray, compiled_run(kind, loss_dtype)(scale))
    assert np.isfinite(params).all()
    assert np.isfinite(losses).all()
    previous = np.concatenate([np.array([[1.0, -0.0]], np.float32), params[:-1]])
    assert bits(params[skipped]) == bits(previous[skipped])
    # What is not a usable number is put right after one step; a huge scale works, or backs off.
    usable = np.isfinite(scale) and scale >= np.finfo(np.float32).tiny
    if usable:
        assert skipped.tolist() == sorted(skipped, reverse=True)
        assert skipped.sum() <= 2
    else:
        assert skipped.tolist() == [True] + [False] * 59
        at_max = scale == np.inf
        lowest, highest = (8.0, 8.0) if kind == "static" else (1.0, 2.0**24)
        assert (scales == (highest if at_max else lowest)).all()
    np.testing.assert_allclose(params[-1], 3.0, atol=1e-2)


@pytest.mark.parametrize("make", [np.float32, float], ids=["numpy", "python"])
@pytest.mark.parametrize("finite", [True, False])
def test_a_state_of_numpy_arrays_or_numbers_works_outside_jit(make, finite):
    """A checkpoint may bring NumPy's arrays, whose overflow would warn."""
    tx = dynamic_loss_scaling(optax.sgd(1.0), init_scale=3e38, growth_interval=1, max_scale=3.4e38)
    params = {"w": np.ones(2, np.float32)}
    grads = {"w": np.full(2, 3e38 if finite else np.inf, np.float32)}
    state = tx.init(params)
    plain = jax.tree.map(lambda leaf: make(leaf) if leaf.dtype == "float32" else int(leaf), state)
    assert bits(tx.update(grads, plain, params)) == bits(tx.update(grads, state, params))
