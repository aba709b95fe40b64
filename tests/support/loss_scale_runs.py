"""A small model, its data with bad batches, and runs of it with and without a scale."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_autocast import dynamic_loss_scaling, scaled_value_and_grad

# How a bad step is skipped: a CPU runs a conditional, a TPU and a GPU a selection.
WAYS = ("conditional", "selection")


def dynamic(init_scale=2.0**16, **options):
    """The scale before the first step."""
    return (
        dynamic_loss_scaling(optax.identity(), init_scale=init_scale, **options).init(()).loss_scale
    )


@contextlib.contextmanager
def skipping_by(way):
    """What is traced in here takes, on every platform, the branch that skips in this way."""

    def chosen(*operands, default, cpu):
        return {"conditional": cpu, "selection": default}[way](*operands)

    real = jax.lax.platform_dependent
    jax.lax.platform_dependent = chosen
    _runner.cache_clear()
    try:
        yield
    finally:
        jax.lax.platform_dependent = real
        _runner.cache_clear()


def bits(tree):
    """The structure of a tree, and the dtype, the shape and each bit of its leaves."""

    def leaf_bits(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        return str(leaf.dtype), leaf.shape, leaf.tobytes()

    return jax.tree.structure(tree), [leaf_bits(leaf) for leaf in jax.tree.leaves(tree)]


def assert_trees_close(actual, expected, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), actual, expected)


def model_loss(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - x[:, :1]) ** 2)


def model_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.normal(size=(4, 8)) / 2).astype(np.float32),
        "b1": np.zeros(8, np.float32),
        "w2": (rng.normal(size=(8, 1)) / 3).astype(np.float32),
    }


def batches(count, bad=(), seed=1):
    rng = np.random.default_rng(seed)
    data = rng.normal(size=(count, 16, 4)).astype(np.float32)
    data[list(bad), 3, 2] = np.inf
    return data


def scaled_step(tx, loss=model_loss):
    """One training step of a scaled loss, not compiled."""

    def step(params, state, x):
        _, grads = scaled_value_and_grad(loss)(state, params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def scaled_run(tx, params, data, loss=model_loss):
    """Parameters and states after each batch, as NumPy arrays with the steps in front."""
    return jax.device_get(_runner(tx, loss)(params, data))


def control_run(inner, params, data):
    """The same of the float32 run without a scale."""
    return jax.device_get(_runner(inner, None)(params, data))


@functools.cache
def _runner(tx, loss):
    def plain_step(params, state, x):
        updates, state = tx.update(jax.grad(model_loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    step = plain_step if loss is None else scaled_step(tx, loss)

    def body(carry, x):
        carry = step(*carry, x)
        return carry, carry

    @jax.jit
    def run(params, data):
        return jax.lax.scan(body, (params, tx.init(params)), data)[1]

    return run


def last(history):
    return jax.tree.map(lambda leaf: leaf[-1], history)
