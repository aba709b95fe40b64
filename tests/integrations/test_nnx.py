"""Autocast of functions of Flax NNX modules: state, parameters and forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import explain
from jmp_autocast.integrations.nnx import autocast
from tests.support.jaxprs import assert_dots_run_in
from tests.support.nnx_models import HALF, X, assert_same_state, bf16, jaxpr_of, new_net

# --- state ----------------------------------------------------------------------------------


@functools.cache
def after_one_call():
    net = new_net()
    return net, nnx.jit(lambda m, x: m(x))(net, X)


def test_metrics_and_rngs_as_arguments():
    class Total(nnx.Metric):
        def __init__(self):
            self.value = nnx.metrics.MetricState(jnp.array(0.0))

        def update(self, x):
            self.value[...] += jnp.sum(x)

    @bf16
    def step(metric, rngs, x):
        metric.update(x @ x.T)
        return jax.random.key_data(rngs.noise())

    metric, rngs, same = Total(), nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    for _ in range(2):
        np.testing.assert_array_equal(step(metric, rngs, X), jax.random.key_data(same.noise()))
    assert rngs.noise.count[...] == 2
    np.testing.assert_allclose(metric.value[...], 2 * (X @ X.T).sum(), rtol=HALF["bfloat16"])


@pytest.mark.parametrize("output_dtype", ["computed", "float16", "bfloat16"])
def test_state_keeps_its_dtype_whatever_the_outputs_get(output_dtype):
    net, (want, _) = new_net(), after_one_call()
    out = nnx.jit(lambda net: bf16(net, output_dtype=output_dtype)(X))(net)
    assert out.dtype == ("bfloat16" if output_dtype == "computed" else output_dtype)
    assert_same_state(net, want, HALF["bfloat16"])
    mean = net.norm.mean[...]  # float32 throughout
    assert (mean != mean.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_attributes_may_come_change_and_go():
    @bf16
    def fn(net, x):
        net.seen = nnx.Intermediate(x @ x.T)
        net.extra = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        net.alias = net.norm
        net.mode = "seen"
        net.calls.set_metadata("unit", "calls")
        del net.cache
        return net.extra(x)

    net = new_net()
    norm, kernel = net.norm, net.head.kernel
    assert fn(net, X).shape == (8, 2)
    np.testing.assert_allclose(net.seen[...], X @ X.T, rtol=0.05, atol=0.05)
    assert net.extra.kernel[...].dtype == "float32"
    assert net.mode == "seen"
    assert net.calls.get_metadata("unit") == "calls"
    assert not hasattr(net, "cache")
    # What was there is the same object.
    assert net.alias is net.norm
    assert (net.norm, net.head.kernel) == (norm, kernel)
    assert net.head.kernel is kernel


def test_results_may_hold_modules_and_static_leaves():
    net = new_net()
    same, block, new, text = bf16(
        lambda net: (net, {"block": net.norm}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "text")
    )(net)
    assert same is net
    assert block["block"] is net.norm
    assert isinstance(new, nnx.Linear)
    assert text == "text"
    assert not any("jmp" in name for m in (net, new) for name in vars(m))


# --- transformations and gradients ----------------------------------------------------------


@pytest.mark.usefixtures("jit_caches")
def test_equal_wrappers_do_not_trace_again():
    traces = []

    def fn(x):
        traces.append(None)
        return x * x

    for _ in range(3):
        jax.jit(bf16(fn))(X)
    assert len(traces) == 1
    assert bf16(fn) == bf16(fn) != autocast(fn)
    net = new_net()
    assert bf16(net) == bf16(net) != bf16(net.__call__) == bf16(net.__call__)
    assert hash(bf16(net)) == hash(bf16(net))


# --- parameters -----------------------------------------------------------------------------


def test_param_variables_are_parameters_by_default():
    x = jnp.ones((8, 8))

    def computed(fn, *args):
        return jax.eval_shape(bf16(fn, output_dtype="computed"), *args).dtype

    # Wherever the module is; a variable of another kind is data, as an array is.
    dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert computed(lambda x, m: x @ x * m["m"].kernel[...], x, {"m": dense}) == "bfloat16"
    assert computed(lambda x, v: x @ x * v[...], x, nnx.Param(x)) == "bfloat16"
    assert computed(lambda x, v: x @ x * v[...], x, nnx.Cache(x)) == "float32"
    assert computed(lambda x, v: x @ x * v, x, x) == "float32"
    # As in the plain autocast: a container of which a product consumes an array as its weight.
    assert computed(lambda p, x: x @ p["w"] * p["b"], {"w": x, "b": x}, x) == "bfloat16"
    assert computed(lambda p, x: x @ x * p["b"], {"b": x}, x) == "float32"
    assert computed(lambda w, x: x @ x * w, x, x) == "float32"
    # What the function itself brings.
    assert computed(functools.partial(lambda v, x: x @ x * v[...], nnx.Cache(x)), x) == "bfloat16"


# --- forms and errors -----------------------------------------------------------------------


def test_decorates_methods_and_functions():
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.array(0))

        @autocast(policy=jnp.bfloat16)
        def __call__(self, x):
            """Says what it does."""
            self.calls[...] += 1
            return self.dense(x)

    model = Model()
    assert model(X).dtype == "float32"
    assert model.calls[...] == 1
    assert Model.__call__.__doc__ == "Says what it does."
    assert_dots_run_in("bfloat16", jaxpr_of(lambda m, x: m(x), model, X))
    half = autocast(lambda m, x: m.dense(x), "float16")
    assert_dots_run_in("float16", jaxpr_of(half, model, X))


class Circular(nnx.Module):
    """A graph that comes back to itself: no tree."""

    def __init__(self):
        self.w = nnx.Param(jnp.eye(8))
        self.itself = nnx.data(self)

    def __call__(self, x):
        return x @ self.w


def test_a_module_that_holds_itself():
    model, x = Circular(), jnp.ones((2, 8))
    call = autocast(lambda model, x: model(x))
    np.testing.assert_array_equal(call(model, x), x)
    gradients = nnx.grad(lambda model: jnp.sum(call(model, x)))(model)
    assert jax.tree.leaves(gradients)[0].dtype == jnp.float32
    assert "dot_general" in str(explain(lambda model, x: model(x), model, x))


class Layers(nnx.Module):
    """Layers in a scan, each of which calls a wrapped module."""

    axes = nnx.StateAxes({(nnx.Param, nnx.RngState, nnx.Intermediate): 0, ...: None})

    @nnx.split_rngs(splits=3, graph=True, graph_updates=True)
    @nnx.vmap(in_axes=(axes, axes), graph=True, graph_updates=True)
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(axes, nnx.Carry), graph=True, graph_updates=True)
    def __call__(self, x):
        x = nnx.gelu(autocast(self.linear)(x))
        self.sow(nnx.Intermediate, "hidden", x)
        return x, None


def test_a_variable_that_holds_a_dict():
    """`nnx.capture` puts one into each module."""
    (y, _), captured = nnx.capture(Layers(nnx.Rngs(0)), nnx.Intermediate)(jnp.ones((2, 8)))
    assert captured["hidden"][0].shape == (3, *y.shape)
    np.testing.assert_array_equal(captured["hidden"][0][-1], y)


def test_the_environment_turns_it_off(monkeypatch):
    low = autocast(lambda m, x: m(x), "bfloat16")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert_dots_run_in("bfloat16", jaxpr_of(low, model, jnp.ones((2, 8))))
    monkeypatch.setenv("JMP_AUTOCAST", "off")
    assert_dots_run_in("float32", jaxpr_of(low, model, jnp.ones((2, 8))))
