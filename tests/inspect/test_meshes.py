"""The tools on explicit meshes, where a sharding is a part of a type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jmp_autocast import BF16, autocast, check_numerics, compare, tune

P = PartitionSpec
RNG = np.random.default_rng(3)
W = RNG.standard_normal((8, 8)).astype(np.float32)
X = RNG.standard_normal((4, 8)).astype(np.float32)


@functools.partial(jax.sharding.auto_axes, out_sharding=P("data", "model"))
def normalized(y):
    return jnp.exp(y) / jnp.sum(jnp.exp(y), axis=1, keepdims=True)


def on_one_mesh(w, x):
    return jnp.mean(jnp.exp(-((x @ w) ** 2)))


def on_two_meshes(w, x):
    y = x @ w
    return jnp.mean(normalized(y) * y)


def in_a_loop(w, x):
    def step(y, _):
        return normalized(y) * y, jnp.sum(y)

    y, sums = jax.lax.scan(step, x @ w, None, length=2)
    return jnp.mean(y) + jnp.mean(sums)


def loop_on_the_other_mesh(w, x):
    @functools.partial(jax.sharding.auto_axes, out_sharding=P("data", "model"))
    def looped(y):
        return jax.lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y), y)

    return jnp.mean(looped(x @ w) ** 2)


def on_each_shard(w, x):
    """A function over devices: what each of them counts is put together outside."""

    @functools.partial(jax.shard_map, in_specs=(P(), P("data", None)), out_specs=P())
    def mapped(w, x):
        return jax.lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "data")

    return mapped(jax.reshard(w, P()), x)


PROGRAMS = [on_one_mesh, on_two_meshes, in_a_loop, loop_on_the_other_mesh, on_each_shard]


@pytest.fixture
def arguments():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield jax.device_put(W, P(None, "model")), jax.device_put(X, P("data", None))


@pytest.mark.parametrize("fn", PROGRAMS)
def test_check_numerics_counts_on_both_meshes(fn, arguments):
    value, report = check_numerics(fn, mode="collect")(*arguments)
    np.testing.assert_allclose(value, jax.jit(fn)(*arguments), rtol=1e-6)
    assert report.first is None
    assert all(row.runs for row in report.rows)


def test_a_fault_on_the_other_mesh_is_found(arguments):
    w, x = arguments
    with pytest.raises(FloatingPointError, match="exp makes 32 infinities among 32 values"):
        check_numerics(lambda w, x: on_two_meshes(jnp.abs(w) * 1e4, jnp.abs(x)))(w, x)


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("fn", PROGRAMS)
def test_compare_reaches_both_meshes(fn, arguments):
    comparison = compare(fn, *arguments, policy=BF16, argnums=0)
    products = [row for row in comparison.rows if row.primitive == "dot_general"]
    assert all(0 < row.introduced < 2**-7 for row in products)
    exact, mixed = jax.jit(jax.grad(fn))(*arguments), jax.jit(jax.grad(autocast(fn)))(*arguments)
    np.testing.assert_allclose(mixed, exact, atol=2**-6 * np.abs(exact).max())
    assert all(gradient.error < 2**-5 for gradient in comparison.gradients.values())


def test_tune_runs_on_both_meshes(arguments):
    policy = tune(on_two_meshes, [arguments], policy=BF16, tolerance=0.1)
    assert policy == BF16
