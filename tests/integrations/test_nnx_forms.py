"""Autocast of functions of Flax NNX modules: options, forms, errors."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmp_autocast
from jmp_autocast.arguments import AUTO
from jmp_autocast.integrations.nnx import autocast
from tests.support.jaxprs import assert_dots_run_in
from tests.support.nnx_models import X, bf16, jaxpr_of, loss_fn, new_net, tower

# --- parameters -----------------------------------------------------------------------------


def add_all(net, x, more):
    """A low matmul times full-size values; those that are no parameters make it float32."""
    return x @ x * net.kernel[...] * more["b"]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (AUTO, "float32"),  # "b" is data
        (None, "float32"),
        (0, "float32"),
        ((0, 2), "bfloat16"),
        ((0, -1), "bfloat16"),
        (lambda path: path in ("0/kernel", "2/b"), "bfloat16"),
        (lambda path: path == "2/b", "float32"),
    ],
    ids=["default", "none", "one", "both", "negative", "paths", "path"],
)
def test_params_take_no_part_in_the_choice_of_dtypes(params, expected):
    net, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((4, 4))
    fn = bf16(add_all, output_dtype="computed", params=params)
    assert jax.eval_shape(fn, net, x, {"b": x}).dtype == expected


def test_param_variables_are_parameters_by_default():
    x = jnp.ones((4, 4))

    def computed(fn, *args):
        return jax.eval_shape(bf16(fn, output_dtype="computed"), *args).dtype

    # Wherever the module is; a variable of another kind is data, as an array is.
    dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert computed(lambda x, m: x @ x * m["m"].kernel[...], x, {"m": dense}) == "bfloat16"
    assert computed(lambda x, v: x @ x * v[...], x, nnx.Param(x)) == "bfloat16"
    assert computed(lambda x, v: x @ x * v[...], x, nnx.Cache(x)) == "float32"
    assert computed(lambda x, v: x @ x * v, x, x) == "float32"
    # As in the plain autocast: argument 0, if it is a container.
    assert computed(lambda p, x: x @ x * p["w"], {"w": x}, x) == "bfloat16"
    assert computed(lambda w, x: x @ x * w, x, x) == "float32"
    # What the function itself brings.
    assert computed(functools.partial(lambda v, x: x @ x * v[...], nnx.Cache(x)), x) == "bfloat16"


# --- forms and errors -----------------------------------------------------------------------


def test_decorates_methods_and_functions():
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.array(0))

        @autocast(compute_dtype=jnp.bfloat16)
        def __call__(self, x):
            """Says what it does."""
            self.calls[...] += 1
            return self.dense(x)

    model = Model()
    assert model(X).dtype == "float32"
    assert model.calls[...] == 1
    assert Model.__call__.__doc__ == "Says what it does."
    assert_dots_run_in("bfloat16", jaxpr_of(lambda m, x: m(x), model, X))
    assert_dots_run_in("float16", jaxpr_of(autocast(lambda m, x: m.dense(x)), model, X))


def test_disabled_runs_the_function_itself():
    net = new_net()
    jaxpr = jaxpr_of(bf16(loss_fn, enabled=False), net, X)
    assert_dots_run_in("float32", jaxpr)
    nnx.jit(lambda net: bf16(net, enabled=False)(X))(net)
    assert net.calls[...] == 1


def test_plain_autocast_takes_modules_that_do_not_change():
    net = nnx.clone(tower())
    plain = functools.partial(jmp_autocast.autocast, compute_dtype=jnp.bfloat16)
    assert_dots_run_in("bfloat16", jaxpr_of(plain(loss_fn), net, X))
    assert_dots_run_in("bfloat16", jaxpr_of(nnx.grad(plain(loss_fn)), net, X))
    trained = new_net()
    with pytest.raises(TypeError, match=r"jmp_autocast\.integrations\.nnx"):
        jaxpr_of(plain(loss_fn), trained, X)
    trained.eval()
    norm = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))
    assert jax.eval_shape(plain(lambda m, x: m(x)), norm, X).dtype == "float32"
