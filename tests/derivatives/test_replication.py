"""What is broadcast or looked up has the gradient of a sum, and the sum runs in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast
from jmp_autocast.interpreters.compat import jaxpr_as_fun
from tests.support.compiler_programs import COMBINATIONS, cast
from tests.support.jaxprs import assert_dots_run_in, find, trace
from tests.support.numerics import normal, relative_error

ROWS = 32_768


def exact_inputs():
    """Row weights are powers of two and the projection small integers: cotangents are exact."""
    random = np.random.default_rng(0)
    hot = np.where(random.random(ROWS) < 0.9, 3, np.arange(ROWS) % 16)
    return {
        "x": random.normal(size=(ROWS, 8)).astype(np.float32),
        "ids": hot.astype(np.int32),
        "row": np.exp2(random.integers(-8, 1, (ROWS, 1))).astype(np.float32),
        "v": np.array([[-7], [5], [-3], [1], [2], [4], [6], [8]], np.float32),
    }


def bias_loss(params, data):
    h = data["x"] @ params["w"] + params["bias"]
    return jnp.sum(h @ data["v"] * data["row"])


def embedding_loss(params, data):
    return jnp.sum(params["table"][data["ids"]] @ data["v"] * data["row"])


def scale_loss(params, data):
    ones = jnp.ones((ROWS, 8)) @ params["eighths"]
    return jnp.sum((ones * params["scale"]) @ data["v"] * data["row"])


REPLICATED = {
    "bias": (bias_loss, {"w": np.ones((8, 8), np.float32), "bias": np.zeros(8, np.float32)}),
    "embedding": (embedding_loss, {"table": np.ones((16, 8), np.float32)}),
    "scalar": (scale_loss, {"eighths": np.full((8, 8), 0.125, np.float32), "scale": np.float32(1)}),
}


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
@pytest.mark.parametrize(("loss", "tree"), REPLICATED.values(), ids=REPLICATED)
def test_the_gradient_of_a_replicated_parameter_sums_in_float32(loss, tree, dtype, level):
    """In bfloat16 half of it would be lost."""
    data = exact_inputs()
    jaxpr = trace(jax.grad(cast(loss, dtype, level)), tree, data)
    assert_dots_run_in(dtype, jaxpr)
    sums = [e for e in find(jaxpr, "reduce_sum", "scatter-add") if ROWS in e.invars[-1].aval.shape]
    assert sums
    assert {e.invars[-1].aval.dtype.name for e in sums} == {"float32"}
    gradients = jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves((tree, data)))
    found = dict(zip(sorted(tree), gradients, strict=True))
    expected = jax.jit(jax.grad(loss))(tree, data)
    for name in {"bias", "table", "scale"} & set(tree):
        is_rounded = name == "bias" and (dtype, level) == ("bfloat16", "compute")
        once = expected[name].astype(dtype if is_rounded else "float32")
        assert relative_error(found[name], once) < 1e-4


@pytest.mark.parametrize("level", ["o1", "compute", "by_hand"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_bias_is_rounded_once_after_its_sum(dtype, level):
    """At the default level it is a float32 sum, and in float16, whose range ends at 65,504."""
    data, (loss, tree) = exact_inputs(), REPLICATED["bias"]
    fn = autocast(loss, Policy(dtype, level=level), params=0)
    found, expected = jax.jit(jax.grad(fn))(tree, data), jax.jit(jax.grad(loss))(tree, data)
    is_rounded = dtype == "bfloat16" and level != "o1"
    once = expected["bias"].astype("bfloat16" if is_rounded else "float32")
    assert relative_error(found["bias"], once) < 1e-4
    assert found["bias"].dtype == jnp.float32


# The gate of a squeeze-and-excite block is computed in 16 bits, and every pixel reads it.
BROADCAST = {
    "row": lambda h, gate: h * gate[:1],
    "scalar": lambda h, gate: h * gate[0, 0],
    "select": lambda h, gate: jnp.where(h > 0, h, gate[0]),
    "broadcast": lambda h, gate: h - jnp.broadcast_to(gate[0], h.shape),
}


@pytest.mark.parametrize("use", BROADCAST.values(), ids=BROADCAST)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_broadcast_computed_value_sums_in_float32(use, dtype):
    def loss(params, data):
        gated = use(data["x"] @ params["w"], params["gate"] @ params["gate"])
        return jnp.sum(gated @ data["v"] * (data["row"] / 64))

    data, tree = exact_inputs(), normal(3, w=(8, 8), gate=(8, 8))
    fn = autocast(loss, dtype)
    jaxpr = trace(jax.grad(fn), tree, data)
    assert_dots_run_in(dtype, jaxpr)
    sums = [e for e in find(jaxpr, "reduce_sum") if ROWS in e.invars[0].aval.shape]
    assert len(sums) == 2  # the loss and the gate's gradient
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}
    used, *_ = find(trace(fn, tree, data), "mul", "sub", "select_n")
    assert used.outvars[0].aval.dtype.name == dtype
    found, expected = jax.jit(jax.grad(fn))(tree, data), jax.jit(jax.grad(loss))(tree, data)
    assert relative_error(found["gate"], expected["gate"]) < 4 * float(jnp.finfo(dtype).eps)


def test_an_expanded_dimension_is_no_broadcast():
    def fn(w, x):
        return (x @ w)[:, None] * (x @ w)[:, None]

    low = autocast(fn, "bfloat16")
    w = np.ones((8, 8), np.float32)
    jaxpr = trace(low, w, w)
    assert len(find(jaxpr, "broadcast_in_dim")) == len(find(trace(fn, w, w), "broadcast_in_dim"))
