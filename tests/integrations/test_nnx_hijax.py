"""Hijax variables of Flax: values of a type of their own, read and written in a trace."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import BF16, autocast, check_numerics, compare, explain, op_stats, tune
from jmp_autocast.integrations import nnx as integration
from tests.support.jaxprs import assert_dots_run_in

# While leaks are checked, JAX 0.10 fails in the plain program, too.
pytestmark = pytest.mark.usefixtures("jit_caches")

X = np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32)


def dense():
    return nnx.with_vars(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), hijax=True)


def loss(dense, x):
    return jnp.mean(dense(x) ** 2)


def test_products_of_what_a_variable_holds_are_in_16_bits():
    layer = dense()
    mixed = autocast(loss, policy=BF16)
    assert_dots_run_in("bfloat16", jax.make_jaxpr(mixed)(layer, X))
    np.testing.assert_allclose(jax.jit(mixed)(layer, X), loss(layer, X), rtol=2**-7)


def test_a_variable_itself_is_an_argument():
    variable = nnx.Param(jnp.asarray(X), hijax=True)
    square = lambda variable: variable[...].T @ variable[...]
    for cast in (autocast, integration.autocast):
        mixed = cast(square, policy=BF16)
        assert_dots_run_in("bfloat16", jax.make_jaxpr(mixed)(variable))
        np.testing.assert_allclose(mixed(variable), square(variable), atol=2**-6 * 10)


def written(fn):
    """What a variable holds after a call, or the error's name, which Flax's version decides."""
    variable = nnx.Variable({"n": jnp.array(0), "x": jnp.ones((2, 2))}, hijax=True)
    try:
        fn(variable)
    except flax.errors.FlaxError as error:
        return type(error).__name__
    return int(variable["n"]), variable["x"].tolist()


@pytest.mark.parametrize("cast", [autocast, integration.autocast], ids=["plain", "nnx"])
def test_a_variable_is_written_where_jit_writes_it(cast):
    def step(variable):
        variable["n"] += 1
        variable["x"] = variable["x"] @ variable["x"]

    mixed = cast(step, policy=BF16)
    assert written(mixed) == written(jax.jit(mixed)) == written(jax.jit(step))


def test_the_adapter_names_the_way():
    with pytest.raises(TypeError, match=r"hijax variable bias.* jmp_autocast\.autocast"):
        integration.autocast(loss, policy=BF16)(dense(), X)


def test_a_call_inside_takes_what_a_variable_holds():
    variable = nnx.Param(jnp.asarray(X), hijax=True)
    square = jax.jit(lambda x: x[...].T @ x[...])
    with pytest.raises(TypeError, match=r"a hijax variable .* variable\[\.\.\.\]"):
        autocast(lambda x: square(x), policy=BF16)(variable)
    found = autocast(lambda x: square(x[...]), policy=BF16)(variable)
    np.testing.assert_allclose(found, X.T @ X, atol=2**-6 * 10)


def test_the_tools_take_variables():
    layer = dense()
    assert explain(loss, layer, X, policy=BF16).totals.low_share == 1.0
    products = op_stats(autocast(loss, policy=BF16), layer, X)
    assert sum(row.flops for row in products if row.primitive == "dot_general") == 2 * 6 * 8 * 3
    np.testing.assert_allclose(check_numerics(loss)(layer, X), loss(layer, X), rtol=1e-6)
    rows = compare(loss, layer, X, policy=BF16).rows
    assert [row.computed for row in rows if row.primitive == "dot_general"] == ["bfloat16"]
    assert tune(loss, layer, X, policy=BF16, tolerance=0.1).policy == BF16
