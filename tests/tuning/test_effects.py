"""The predicted effects are those of really rounding an operation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jmp_autocast.inspect.effects.predicted import pass_of

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (16, 8))
W = {name: jax.random.normal(KEYS[i + 1], (8, 8)) / 3 for i, name in enumerate("abc")}


def low(x, bits=7):
    return lax.reduce_precision(x, 8, bits)


def product(x, w, rounds):
    with jax.named_scope("first"):
        return low(low(x) @ low(w)) if rounds else x @ w


# Programs with two products. The first is in a scope, and in the structure under test.
def plain(params, x, rounds):
    return jnp.tanh(product(x, params["a"], rounds)) @ params["b"]


def in_checkpoint(params, x, rounds):
    inner = jax.checkpoint(lambda x, w: jnp.tanh(product(x, w, rounds)))
    return inner(x, params["a"]) @ params["b"]


def in_branch(params, x, rounds):
    taken = lambda x, w: product(x, w, rounds)
    other = lambda x, w: x * 2.0
    return lax.cond(jnp.sum(x) < 1e9, taken, other, x, params["a"]) @ params["b"]


def in_calls(params, x, rounds):
    inner = jax.jit(lambda x, w: jax.nn.relu(product(x, w, rounds)))
    return jax.jit(lambda x, w: inner(x, w) + 1.0)(x, params["a"]) @ params["b"]


def in_loop_of_two(params, x, rounds):
    step = lambda c, w: (c + product(x, w, rounds), None)
    weights = jnp.stack([params["a"], params["c"]])
    return lax.scan(step, jnp.zeros_like(x), weights)[0] @ params["b"]


PROGRAMS = (plain, in_checkpoint, in_branch, in_calls, in_loop_of_two)


def loss_of(program, rounds=False):
    return lambda params, x: jnp.mean(program(params, x, rounds) ** 2)


def effects_of(fn, *args, dtype=jnp.bfloat16, operations=(("", "dot_general"),), gradients=False):
    """The effects of operations, and the program's sites."""
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *arrays: jax.tree.leaves(fn(*jax.tree.unflatten(tree, arrays)))
    found = pass_of(flat, leaves, operations, np.dtype(dtype), gradients)
    assert not found.error
    return found.effects(leaves), found


FIRST = ("first", "dot_general")


@pytest.mark.parametrize("program", PROGRAMS)
def test_prediction_and_real_run(program):
    """Both are the change of the loss if the product is rounded by hand."""
    loss = loss_of(program)
    effects, found = effects_of(loss, W, X, operations=[FIRST, ("", "dot_general")])
    change = float(jax.jit(loss_of(program, True))(W, X) - jax.jit(loss)(W, X))
    assert effects[FIRST].change == pytest.approx(change, rel=0.1)
    assert abs(effects["", "dot_general"].change) > 0
    assert effects[FIRST].in_range
    assert found.has_loss
    loops = [site.loops for site in found.sites if FIRST in site.operations]
    assert loops == [(2,) if program is in_loop_of_two else ()]


def test_the_error_of_arrays():
    """Without a loss: the relative error of all results together, as if errors were independent."""
    run = lambda params, x: (plain(params, x, False), x @ params["c"])
    rounded = lambda params, x: (plain(params, x, True), x @ params["c"])
    effects, found = effects_of(run, W, X, operations=[FIRST])
    assert not found.has_loss
    (exact, _), (lowered, _) = run(W, X), rounded(W, X)
    error = float(jnp.linalg.norm(lowered - exact) / jnp.linalg.norm(exact))
    assert effects[FIRST].spread == effects[FIRST].change == pytest.approx(error, rel=0.3)


def test_what_the_dtype_does_not_hold():
    def loss(w, x):
        return jnp.sum((x * 1e5) @ w["a"] @ w["b"]) * 1e-5

    effects, _ = effects_of(loss, W, X, dtype=jnp.float16)
    assert not effects["", "dot_general"].in_range
    assert effects["", "dot_general"].size == math.inf
    assert effects_of(loss, W, X)[0]["", "dot_general"].in_range


@pytest.mark.parametrize("scale", [1e-11, 1e9])
def test_gradients_that_the_dtype_does_not_hold(scale):
    """Cotangents below and above the range of float16 count with `gradients`."""
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w["a"])) * scale
    effects, _ = effects_of(loss, W, X, dtype=jnp.float16)
    assert effects["", "dot_general"].in_range
    effects, _ = effects_of(loss, W, X, dtype=jnp.float16, gradients=True)
    assert not effects["", "dot_general"].in_range
    effects, _ = effects_of(loss, W, X, gradients=True)
    assert effects["", "dot_general"].in_range


def test_a_rule_of_its_own_stands_for_what_it_holds():
    @jax.custom_vjp
    def kernel(x, w):
        with jax.named_scope("kernel"):
            return jnp.sin(x @ w)

    kernel.defvjp(
        lambda x, w: (kernel(x, w), (x, w)),
        lambda kept, c: jax.vjp(lambda x, w: jnp.sin(x @ w), *kept)[1](c),
    )
    loss = lambda w, x: jnp.sum(kernel(x, w["a"]) ** 2)
    operations = [("kernel", "sin"), ("kernel", "dot_general")]
    effects, _ = effects_of(loss, W, X, operations=operations)
    change = jnp.sum(low(jnp.sin(X @ W["a"])) ** 2) - loss(W, X)
    for each in operations:
        assert effects[each].change == pytest.approx(float(change), rel=0.1)


def test_what_has_no_cotangent_has_no_effect():
    """A `while` has no gradient, and neither have the integers of `top_k`."""

    def loss(w, x):
        with jax.named_scope("unseen"):
            h = x @ w["a"]
        steps = lax.while_loop(lambda n: n < 3.0, lambda n: n + 1, h[0, 0])
        _, order = lax.top_k(h @ w["b"], 2)
        return jnp.sum(x @ w["c"]) * steps + jnp.sum(order.astype(jnp.float32))

    operations = [("unseen", "dot_general"), ("", "dot_general")]
    effects, _ = effects_of(loss, W, X, operations=operations)
    assert list(effects) == [("", "dot_general")]


# JAX itself keeps the trace of a loop in a device map for its checks of leaks.
@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("checked", [True, False])
def test_what_stands_in_a_device_map(checked):
    """Each device has a part of the error: the effect is that of the whole batch in one place."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    loss, operations = loss_of(in_loop_of_two), [FIRST, ("", "dot_general")]
    specs: dict[str, Any] = dict(in_specs=(PartitionSpec(), PartitionSpec("data")))
    specs["out_specs"] = PartitionSpec()
    mean = lambda w, x: lax.pmean(loss(w, x), "data")
    mapped = jax.shard_map(mean, mesh=mesh, check_vma=checked, **specs)
    found, _ = effects_of(mapped, W, X, operations=operations)
    expected, _ = effects_of(loss, W, X, operations=operations)
    for each in operations:
        assert found[each].change == pytest.approx(expected[each].change, rel=1e-3)
        assert found[each].spread == pytest.approx(expected[each].spread, rel=1e-3)


def test_memory_is_that_of_a_gradient():
    """Errors and cotangents of all products of a deep program are never there together."""

    def loss(w, x):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    arrays = (jnp.eye(64), jnp.ones((512, 64)))
    _, found = effects_of(loss, *arrays)
    jitted: list[Any] = [found.run, jax.jit(jax.value_and_grad(loss))]
    measured, gradient = (
        f.lower(*arrays).compile().memory_analysis().temp_size_in_bytes for f in jitted
    )
    assert measured <= 2 * gradient, (measured, gradient)
