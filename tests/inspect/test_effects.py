"""`explain_effects`: what it predicts is what really rounding an operation does."""

import json

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmp_autocast import explain_effects
from jmp_autocast.inspect.effects import explain_effects as module
from jmp_autocast.inspect.effects.number_format import parse

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (16, 8))
W = {name: jax.random.normal(KEYS[i + 1], (8, 8)) / 3 for i, name in enumerate("abc")}


def low(x, bits=7):
    return lax.reduce_precision(x, 8, bits)


def product(x, w, rounds):
    return low(low(x) @ low(w)) if rounds else x @ w


# A program with two products. The first stands in what the row is about.
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


@pytest.mark.parametrize("program", PROGRAMS)
def test_prediction_and_real_run(program):
    """Both are the change of the loss where the product is rounded by hand."""
    loss = loss_of(program)
    effects = explain_effects(loss, W, X, formats="bfloat16", kinds="product")
    first, second = (row for row in effects.rows)
    change = float(jax.jit(loss_of(program, True))(W, X) - jax.jit(loss)(W, X))
    assert first.measured == pytest.approx(change, rel=0.02)
    assert first.predicted == pytest.approx(change, rel=0.1)
    assert abs(second.predicted) > 0
    assert second.doubt == first.doubt == ""
    assert effects.loss == pytest.approx(float(loss(W, X)), rel=1e-5)
    if program is in_loop_of_two:
        assert first.inside == ("scan",)
        assert len(first.iterations) == 2
        assert sum(first.iterations) == pytest.approx(first.predicted, rel=1e-3)


def test_one_trace_and_both_kinds_of_values():
    """Parameters and operations besides products; the loss is traced once for all batches."""
    traces = []

    def loss(params, x):
        traces.append(1)
        with jax.named_scope("net"):
            return jnp.mean(jnp.exp(low(x @ params["a"], 23)) ** 2), "aux"

    batches = [(W, X), (W, X + 0.1), (W, X * 0.5)]
    kinds = ("operation", "parameter")
    effects = explain_effects(loss, batches=batches, formats="bfloat16", kinds=kinds, runs=20)
    assert len(traces) == 1
    assert effects.batches == 3
    params = effects.of("bfloat16", "parameter")
    assert {row.scope for row in params} == {"0/a", "0/b", "0/c"}
    worst = params[0]
    rounded_a = {**W, "a": low(W["a"])}
    changes = [float(loss(rounded_a, x)[0] - loss(W, x)[0]) for _, x in batches]
    assert worst.measured == pytest.approx(np.mean(changes), rel=0.05)
    assert worst.deviation == pytest.approx(np.std(changes), rel=0.1)
    assert [row.predicted for row in params[1:]] == [0, 0]  # the loss does not read them
    exp = next(row for row in effects.rows if row.primitive == "exp")
    assert exp.scope == "net"
    assert exp.predicted == pytest.approx(exp.measured, rel=0.05)
    (whole, net) = effects.by_scope("bfloat16", "operation")
    assert (whole.scope, net.scope, whole.count) == ("", "net", net.count)
    assert net.spread >= exp.spread


def test_what_first_order_does_not_see_is_told():
    def loss(w, x):
        h = (x * 300.0) @ w["a"]
        with jax.named_scope("routed"):
            chosen, _ = lax.top_k(h @ w["b"], 2)
        # Behind a `stop_gradient` anything may stand, also what has no derivative.
        steps = lax.while_loop(lambda n: n < 3.0, lambda n: n + 1, lax.stop_gradient(h[0, 0]))
        return jnp.sum(chosen * 1e3) + 0.0 * steps

    effects = explain_effects(loss, W, X, formats=["float16", "e4m3"], kinds="product")
    assert [text.split(",")[0] for text in effects.decisions] == ["top_k"]
    row = effects.of("e4m3")[0]
    assert row.lost > 0
    assert row.doubt == "range"
    assert "top_k" in str(effects)
    assert "range" in str(effects)
    read = json.loads(effects.to_json())
    assert read["rows"][0]["effect"] == effects.rows[0].effect
    assert effects.summary in str(effects)


def test_a_rule_of_its_own_is_one_operation():
    @jax.custom_vjp
    def kernel(x, w):
        return jnp.sin(x @ w)

    kernel.defvjp(
        lambda x, w: (kernel(x, w), (x, w)),
        lambda kept, c: jax.vjp(lambda x, w: jnp.sin(x @ w), *kept)[1](c),
    )
    loss = lambda w, x: jnp.sum(kernel(x, w["a"]) ** 2)
    effects = explain_effects(loss, W, X, formats="bfloat16", kinds="operation", runs=9)
    assert [text.split(",")[0] for text in effects.closed] == ["custom_vjp_call"]
    row = next(row for row in effects.rows if row.primitive == "custom_vjp_call")
    assert row.measured == pytest.approx(row.predicted, rel=0.1)


def test_scopes_and_runs_are_chosen():
    def loss(w, x):
        with jax.named_scope("net"):
            for name in "abc":
                with jax.named_scope(name):
                    x = jnp.tanh(x @ w[name])
        return jnp.mean(x)

    effects = explain_effects(loss, W, X, formats="bfloat16", scopes="*/[ab]", runs=1)
    assert [row.scope for row in effects.rows] == ["net/a", "net/b"]
    assert sum(row.measured is not None for row in effects.rows) == 1
    assert explain_effects(loss, W, X, formats="e4m3", runs=0).rows[0].measured is None


def test_second_order_is_marked():
    """The cotangent at the minimum of a square is zero, and a rounding only makes it larger."""
    x = jnp.full((1, 8), 0.3)
    loss = lambda w: jnp.sum((x @ w - lax.stop_gradient(x @ W["a"])) ** 2)
    effects = explain_effects(loss, W["a"] * 1.0, formats="e4m3")
    product = effects.of("e4m3", "product")[0]
    assert product.measured is None or product.doubt == "second order"


class Net(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dense(x)


def of_nnx():
    from jmp_autocast.integrations import nnx as _  # noqa: F401

    return lambda net, x: jnp.mean(net(x) ** 2), Net(), "0/dense/kernel"


def of_linen():
    model = nn.Dense(4)
    loss = lambda v, x: jnp.mean(model.apply(v, x) ** 2)
    return loss, model.init(KEYS[0], X), "0/params/kernel"


def of_equinox():
    model = eqx.nn.Linear(8, 4, key=KEYS[0])
    return lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), model, "0/weight"


@pytest.mark.parametrize("framework", [of_nnx, of_linen, of_equinox])
def test_models_of_frameworks(framework):
    loss, model, kernel = framework()
    effects = explain_effects(loss, model, X, formats="bfloat16")
    row = next(row for row in effects.of("bfloat16", "parameter") if row.scope == kernel)
    assert row.predicted != 0
    assert len(effects.of("bfloat16", "product")) == 1
    if framework is of_nnx:
        assert model.calls[...] == 0  # what looks at a program changes no state


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays(kind):
    loss = loss_of(plain)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data", None)))
        weights = jax.device_put(W, NamedSharding(mesh, PartitionSpec(None, None)))
        found = explain_effects(lambda w, x: loss(w, x), weights, x, formats="bfloat16")
    expected = explain_effects(loss, W, X, formats="bfloat16", runs=0)
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row.predicted == pytest.approx(other.predicted, rel=0.02, abs=1e-7)


# JAX itself keeps the trace of a loop in a device map for its checks of leaks.
@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("checked", [True, False])
def test_what_stands_in_a_device_map(checked):
    """Each device has a part of the error: the effect is that of the whole batch in one place."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    loss = loss_of(in_loop_of_two)
    specs = dict(in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec())
    mean = lambda w, x: lax.pmean(loss(w, x), "data")
    mapped = jax.shard_map(mean, mesh=mesh, check_vma=checked, **specs)
    found = explain_effects(mapped, W, X, formats="bfloat16", kinds="product")
    expected = explain_effects(loss, W, X, formats="bfloat16", kinds="product")
    assert not found.closed
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row.inside == ("shard_map", *other.inside)
        assert row.predicted == pytest.approx(other.predicted, rel=1e-3)
        assert row.spread == pytest.approx(other.spread, rel=1e-3)
        assert row.measured == pytest.approx(other.measured, rel=0.05)


def gradient(w, x):
    return jax.grad(loss_of(plain))(w, x)


def update(w, x):
    """As Adam takes it: each element by its own size."""
    return jax.tree.map(lambda g: g / (jnp.abs(g) + 0.1), gradient(w, x))


@pytest.mark.parametrize("function", [gradient, update])
def test_errors_of_gradients_and_of_updates(function):
    """The predicted error is that of the results where a product is really rounded."""
    found = explain_effects(function, W, X, formats="bfloat16", relative=True, runs=9)
    rows = found.of("bfloat16", "product")
    assert {row.backward for row in rows} == {True, False}
    assert {row.doubt for row in rows} == {""}
    assert all(2e-4 < row.measured < 2e-2 for row in rows)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(function(W, X))))
    assert found.loss == pytest.approx(float(norm), rel=1e-5)
    (whole,) = found.by_scope("bfloat16")
    assert whole.effect == pytest.approx(sum(row.effect**2 for row in rows) ** 0.5)
    assert "the largest relative error is" in found.summary
    assert "backward" in str(found)


def test_memory_is_that_of_a_gradient():
    """Errors and cotangents of all products of a deep program are never there together."""

    def loss(w, x):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    x = jnp.ones((512, 64))
    program, (arrays,) = module._traced(loss, [(jnp.eye(64), x)], {}, 0, relative=False)
    formats = [parse(name) for name in ("bfloat16", "float16")]
    look = module._Look(program, program.sites.where(lambda s: s.kind == "product"), formats, True)
    measured, gradient = (
        jax.jit(f).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
        for f in (look.measure, jax.value_and_grad(loss))
    )
    assert measured <= 2 * gradient, (measured, gradient)


def test_what_a_loop_of_a_backward_pass_holds_belongs_to_it():
    def loss(w, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0])

    given = jnp.full((3, 8, 8), 0.3), X
    rows = explain_effects(jax.grad(loss), *given, relative=True, kinds="product", runs=0).rows
    assert [(row.inside, row.backward) for row in rows] == [
        (("scan",), False),
        (("scan",), True),
        (("scan",), True),
    ]
