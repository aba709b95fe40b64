"""The tools on unusual arrays: on explicit meshes, in the host's memory, parts, batched loops.

On an explicit mesh a sharding is a part of a type. Unreduced parts are not measured; their operands
and results are. Under `vmap` the predicate of a loop has an element for each of the batch.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import primal_tangent_dtype
from jax.sharding import AxisType, PartitionSpec

from jmp_autocast import BF16, FP16, autocast, check_numerics, compare, explain, tune
from tests.support.numerics import relative_error

P = PartitionSpec
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
RNG = np.random.default_rng(3)
W = RNG.standard_normal((8, 8)).astype(np.float32)
X = RNG.standard_normal((4, 8)).astype(np.float32)


@functools.partial(jax.sharding.auto_axes, out_sharding=P("data", "model"))
def normalized(y):
    return jnp.exp(y) / jnp.sum(jnp.exp(y), axis=1, keepdims=True)


def on_two_meshes(w, x):
    y = x @ w
    return jnp.mean(normalized(y) * y)


def on_each_shard(w, x):
    """A function over devices: the counts of the devices are merged outside."""

    @functools.partial(jax.shard_map, in_specs=(P(), P("data", None)), out_specs=P())
    def mapped(w, x):
        return jax.lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "data")

    return mapped(jax.reshard(w, P()), x)


def offloaded(w, x):
    kept = jax.device_put(jnp.sin(x @ w), HOST)
    return jax.device_put(kept, DEVICE) @ w


def unreduced(w, x):
    """The gradient of a weight is summed over steps, and over devices once, at the end."""

    def step(total, rows):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(rows @ w)))(w), None

    parts = jax.reshard(jnp.zeros_like(w), P(unreduced={"data"}))
    total = jax.reshard(jax.lax.scan(step, parts, x)[0], P())
    return jax.reshard(w, P()) - 0.1 * total


@jax.vmap
def roots(a):
    """Newton's method: each element ends after another number of steps."""
    return jax.lax.while_loop(
        lambda x: jnp.abs(x * x - a) > 1e-4 * a, lambda x: 0.5 * (x + a / x), a
    )


def recurrent(w, rows, lengths):
    """Rows of different lengths; one carry is a key, which has no elements of its own."""

    def row(x, n):
        def step(state):
            x, i, key = state
            return jnp.tanh(x @ w), i + 1, jax.random.split(key)[0]

        return jax.lax.while_loop(lambda s: s[1] < n, step, (x, 0, jax.random.key(n)))[:2]

    return jax.vmap(row)(rows, lengths)


ON_MESHES = [on_two_meshes, on_each_shard]
# The largest number of steps of an element in each loop.
LOOPS = {roots: 7, recurrent: 5}


@contextlib.contextmanager
def arguments_of(fn):
    """The arguments of a program, on the mesh that it runs on."""
    shape, names = ((2,), ("data",)) if fn is unreduced else ((2, 2), ("data", "model"))
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))
    if fn is roots:
        yield (np.float32([1.0, 4.0, 9.0, 100.0]),)
    elif fn is recurrent:
        yield W / 3, X[:3], np.int32([0, 2, 5])
    elif fn is offloaded:
        yield W, X
    elif fn is unreduced:
        with jax.set_mesh(mesh):
            x = jax.device_put(X.reshape(2, 2, 8), P(None, "data"))
            yield jax.device_put(W, P(reduced={"data"})), x
    else:
        with jax.set_mesh(mesh):
            yield jax.device_put(W, P(None, "model")), jax.device_put(X, P("data", None))


def error(found, expected):
    return max(map(relative_error, jax.tree.leaves(found), jax.tree.leaves(expected)))


each_program = pytest.mark.parametrize("fn", [*ON_MESHES, offloaded, unreduced, *LOOPS])


@each_program
def test_check_numerics_returns_what_the_program_does(fn):
    with arguments_of(fn) as args:
        checked = check_numerics(fn, mode="collect")
        found, report = checked(*args)
        assert error(found, jax.jit(fn)(*args)) < 1e-6
        if fn in LOOPS:
            assert error(jax.jit(checked)(*args)[0], found) < 1e-6
    assert report.first is None
    assert max(row.runs for row in report.rows) >= LOOPS.get(fn, 1)
    assert all(row.runs for row in report.rows)


@each_program
@pytest.mark.usefixtures("jit_caches")
def test_compare_measures_it(fn):
    with arguments_of(fn) as args:
        of_loss = {"argnums": 0} if fn in ON_MESHES else {}
        comparison = compare(fn, *args, policy=BF16, **of_loss)
        rows = [row for row in comparison.rows if row.primitive == "dot_general"]
        assert rows or fn is roots
        assert all(0 < row.introduced < 2e-2 for row in rows)
        assert max(output.error for output in comparison.outputs.values()) < 2e-2
        if of_loss:
            exact, mixed = (jax.jit(jax.grad(f))(*args) for f in (fn, autocast(fn, policy=FP16)))
            np.testing.assert_allclose(mixed, exact, atol=2**-6 * np.abs(exact).max())
            assert all(gradient.error < 2**-5 for gradient in comparison.gradients.values())
        elif fn not in LOOPS:
            mixed = jax.jit(autocast(fn, policy=BF16))(*args)
            assert 0 < error(mixed, jax.jit(fn)(*args)) < 2e-2
    if fn is recurrent:
        assert rows[0].runs == 5


@pytest.mark.parametrize("fn", [on_two_meshes, offloaded, unreduced, recurrent])
def test_explain_and_tune_read_it(fn):
    with arguments_of(fn) as args:
        assert explain(fn, *args, policy=BF16).rows
        assert tune(fn, *args, policy=BF16, tolerance=0.1).policy == BF16


def test_a_fault_on_the_other_mesh_is_found():
    with arguments_of(on_two_meshes) as (w, x):
        fn = check_numerics(lambda w, x: on_two_meshes(jnp.abs(w) * 1e4, jnp.abs(x)))
        with pytest.raises(FloatingPointError, match="exp makes 32 infinities among 32 values"):
            fn(w, x)


def test_a_nan_of_one_element_of_a_batched_loop_is_found():
    @jax.vmap
    def decreasing(x):
        return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.log(s[0]), s[1] + 1), (x, 0))

    message = r"log makes 1 NaN among 6 values[^!]*first in run 2 of 3"
    with pytest.raises(FloatingPointError, match=message):
        check_numerics(decreasing)(np.float32([1e30, 2.0]))


def test_a_dtype_that_says_no_bytes_is_explained():
    stored = primal_tangent_dtype(jnp.dtype("int8"), jnp.dtype("bfloat16"))

    def layer(q, w, x):
        kept = jax.lax.convert_element_type(q, stored)
        return (x @ w) * jax.lax.convert_element_type(kept, jnp.int8).astype("float32")

    report = explain(layer, jnp.arange(8, dtype="int8"), W, X, policy=BF16)
    assert "to_edtype" in str(report)
    assert report.totals.low_share == 1.0
