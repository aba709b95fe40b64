"""A rule may emit a function in place of an equation; it survives what JAX does to the program."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jmp_autocast import BF16, CastPolicy, Decision, autocast, explain, full_precision
from tests.support.jaxprs import find, trace

X = np.linspace(-0.7, 0.7, 64, dtype=np.float32).reshape(8, 8)


def rational_tanh(x):
    return x * (27 + x * x) / (27 + 9 * x * x)


def emit_tanh(eqn):
    return Decision(emit=rational_tanh)


POLICY = BF16.with_rules({"tanh": emit_tanh})


def net(w, x):
    return jnp.tanh(x @ w)


def expected_net(w, x):
    return rational_tanh(x @ w)


def loss(fn):
    return lambda w, x: jnp.sum(fn(w, x) ** 2)


def through_scan(fn):
    return lambda w, x: lax.scan(lambda c, _: (fn(w, c), None), x, None, length=3)[0]


def through_cond(fn):
    return lambda w, x: lax.cond(x.sum() < 100, fn, lambda w, x: x, w, x)


def through_shard_map(fn):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    return lambda w, x: jax.shard_map(
        fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )(w, x)


INSIDE = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "scan": through_scan,
    "cond": through_cond,
    "remat": jax.checkpoint,
    "vmap": lambda fn: jax.vmap(fn, in_axes=(None, 0)),
    "shard_map": through_shard_map,
}
OUTSIDE = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(loss(fn)),
    "jvp": lambda fn: lambda w, x: jax.jvp(lambda w: fn(w, x), (w,), (w,))[1],
    "vmap": lambda fn: jax.vmap(fn, in_axes=(None, 0)),
}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
def test_it_survives_the_transformations(inside, outside):
    x = np.stack([X, X]) if outside is OUTSIDE["vmap"] else X
    found = outside(autocast(inside(net), policy=POLICY))(X, x)
    chex.assert_trees_all_close(found, outside(inside(expected_net))(X, x), rtol=5e-2, atol=2e-2)
    text = str(trace(outside(autocast(inside(net), policy=POLICY)), X, x))
    assert "tanh" not in text.replace("rational_tanh", "")


def test_the_function_gets_declared_dtypes_and_the_planner_is_told_the_results():
    seen = []

    def emitted(x):
        seen.append(x.dtype)
        return jnp.tanh(x).astype(jnp.bfloat16)

    rule = lambda eqn: Decision(emit=emitted, output_dtype=jnp.bfloat16)
    policy = BF16.with_rules({"tanh": rule})
    fn = autocast(lambda x: jnp.tanh(x @ x) @ x, policy=policy, output_dtype="computed")
    assert jax.eval_shape(fn, X).dtype == jnp.bfloat16
    assert seen == [np.dtype("float32")]
    rows = explain(fn, X).rows
    (row,) = [row for row in rows if row.primitive == "tanh"]
    assert (row.operands, row.results) == (("float32",), ("bfloat16",))
    assert (row.reason, row.cause) == ("EMIT", "emitted")


def test_operands_may_be_asked_for_in_the_compute_dtype():
    rule = lambda eqn: Decision(
        emit=lambda x: jnp.tanh(x).astype(jnp.float32), operand_dtype=eqn.compute_dtype
    )
    jaxpr = trace(autocast(net, policy=BF16.with_rules({"tanh": rule})), X, X)
    (eqn,) = find(jaxpr, "tanh")
    assert eqn.invars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("emitted", "got"),
    [
        (lambda x: x.astype(jnp.bfloat16), r"bfloat16\[8,8\]"),
        (lambda x: x[0], r"float32\[8\]"),
        (lambda x: (x, x), r"float32\[8,8\], float32\[8,8\]"),
    ],
    ids=["dtype", "shape", "number"],
)
def test_a_wrong_result_is_an_error(emitted, got):
    rule = lambda eqn: Decision(emit=emitted, name="mine")
    with pytest.raises(
        TypeError,
        match=rf"mine, which .* in place of tanh, must return float32\[8,8\], got {got}\.",
    ):
        autocast(net, policy=BF16.with_rules({"tanh": rule}))(X, X)


def test_full_precision_wins():
    def fn(x):
        with full_precision():
            return jnp.tanh(x)

    assert find(trace(autocast(fn, policy=POLICY), X), "tanh")


def test_equations_that_look_alike_may_be_replaced_by_different_functions():
    def rule(eqn):
        return Decision(emit=jnp.sin if "first" in eqn.scope else jnp.cos)

    def fn(x):
        with jax.named_scope("first"):
            y = jnp.tanh(x)
        with jax.named_scope("second"):
            return y, jnp.tanh(x)

    first, second = autocast(fn, policy=BF16.with_rules({"tanh": rule}))(X)
    np.testing.assert_allclose(first, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(second, np.cos(X), rtol=1e-6)


# --- calls, loops and casts -----------------------------------------------------------------


@jax.jit
def smooth(x, y):
    return jnp.tanh(x) + y


@jax.custom_jvp
def clipped(x, y):
    return jnp.clip(x, -1, 1) + y


clipped.defjvps(lambda t, out, x, y: t, lambda t, out, x, y: t)


@pytest.mark.parametrize(
    ("primitive", "function"),
    [("jit", smooth), ("custom_jvp_call", clipped)],
    ids=["jit", "custom"],
)
def test_a_call_is_replaced_by_the_name_of_its_function(primitive, function):
    def rule(eqn):
        return Decision(emit=lambda x, y: x * y) if eqn.function == function.__name__ else None

    policy = BF16.with_rules({primitive: rule})
    fn = lambda w, x: function(x @ w, jax.nn.relu(x))
    found = autocast(fn, policy=policy)(X, X)
    np.testing.assert_allclose(found, (X @ X) * np.maximum(X, 0), rtol=2e-2, atol=1e-2)
    gradient = jax.grad(loss(autocast(fn, policy=policy)))(X, X)
    expected = jax.grad(loss(lambda w, x: (x @ w) * jax.nn.relu(x)))(X, X)
    np.testing.assert_allclose(gradient, expected, rtol=5e-2, atol=2e-2)


def test_a_cast_is_replaced():
    def rule(eqn):
        narrows = eqn.result_dtypes[0] == jnp.bfloat16
        towards_zero = lambda x: lax.reduce_precision(x * (1 - 2**-8), 8, 7).astype(jnp.bfloat16)
        return Decision(emit=towards_zero, output_dtype=jnp.bfloat16) if narrows else None

    policy = BF16.with_rules({"convert_element_type": rule})
    fn = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    x = np.float32([1.0])
    assert float(autocast(fn, policy=policy)(x)[0]) < 1.0 == float(autocast(fn, policy=BF16)(x)[0])


def test_a_policy_for_a_call_is_an_error():
    policy = BF16.with_rules({"jit": lambda eqn: CastPolicy.FP32})
    with pytest.raises(TypeError, match=r"rule for primitive 'jit' decided .*Decision\(emit="):
        autocast(lambda x: smooth(x, x), policy=policy)(X)
