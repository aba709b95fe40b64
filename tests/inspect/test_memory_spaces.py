"""The tools on arrays in the memory of the host, and on parts that are not yet added up.

The latter are not measured; what they are made from and what becomes of them is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jmp_autocast import BF16, autocast, check_numerics, compare, tune
from tests.support.numerics import relative_error

P = PartitionSpec
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
W = np.random.default_rng(0).standard_normal((4, 4), np.float32)
X = np.random.default_rng(1).standard_normal((8, 4), np.float32)


def offloaded(w, x):
    kept = jax.device_put(jnp.sin(x @ w), HOST)
    return jax.device_put(kept, DEVICE) @ w


def returned_on_host(w, x):
    return jax.device_put(jnp.sin(x @ w), HOST)


def read_from_host(w, x):
    return jnp.sum(jax.device_put(x, DEVICE) @ w)


def unreduced(w, x):
    """The gradient of a weight is added up over steps, and over devices once, at the end."""

    def step(total, rows):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(rows @ w)))(w), None

    parts = jax.reshard(jnp.zeros_like(w), P(unreduced={"data"}))
    total = jax.reshard(jax.lax.scan(step, parts, x)[0], P())
    return jax.reshard(w, P()) - 0.1 * total


@pytest.fixture(params=["offloaded", "returned_on_host", "read_from_host", "unreduced"])
def program(request):
    fn = globals()[request.param]
    if request.param == "unreduced":
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            w = jax.device_put(W, P(reduced={"data"}))
            yield fn, (w, jax.device_put(X.reshape(4, 2, 4), P(None, "data")))
    else:
        place = HOST if request.param == "read_from_host" else DEVICE
        yield fn, (W, jax.device_put(X, place))


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def test_check_numerics_counts_them(program):
    fn, args = program
    found, report = check_numerics(fn, mode="collect")(*args)
    assert relative_error(to_numpy(found), to_numpy(jax.jit(fn)(*args))) < 1e-6
    assert report.first is None
    assert {"dot_general", "transpose"} & {row.primitive for row in report.rows}


def test_compare_measures_them(program):
    fn, args = program
    table = compare(fn, *args, policy=BF16)
    dots = [row for row in table.rows if row.primitive == "dot_general"]
    assert dots
    assert all(0 < row.error < 2e-2 for row in dots)
    error = max(output.error for output in table.outputs.values())
    assert 0 < error < 2e-2
    mixed = jax.jit(autocast(fn, policy=BF16))(*args)
    assert 0 < relative_error(to_numpy(mixed), to_numpy(jax.jit(fn)(*args))) < 2e-2


def test_tune_runs_them(program):
    fn, args = program
    assert tune(fn, [args], policy=BF16, tolerance=0.1) is not None
