"""Autocast of functions of Flax NNX modules: options, forms, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_autocast import explain
from jmp_autocast.integrations.nnx import autocast
from tests.support.jaxprs import assert_dots_run_in
from tests.support.nnx_models import X, bf16, jaxpr_of

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
