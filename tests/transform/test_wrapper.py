"""A wrapper looks like its function, wherever its parameters are, and is equal to its equals."""

import dataclasses
import functools
import inspect
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast
from jmp_autocast.integrations import nnx as nnx_integration
from tests.support.jaxprs import assert_dots_run_in, find, trace
from tests.support.pickled_functions import Layer, decorated

W = np.eye(8, dtype=np.float32)
X = np.ones((8, 8), np.float32)
CASTS = [autocast, nnx_integration.autocast]


def scaled(x: jax.Array, power=2, /, *rest: float, scale: float = 3.0, **more) -> jax.Array:
    """Multiplies and scales.

    Second paragraph.
    """
    return scale * (x @ x)


@pytest.mark.parametrize("cast", CASTS, ids=["autocast", "nnx"])
def test_metadata(cast):
    wrapper = cast(scaled)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(wrapper, name) == getattr(scaled, name), name
    assert wrapper.__wrapped__ is inspect.unwrap(wrapper) is scaled
    assert inspect.signature(wrapper) == inspect.signature(scaled)
    assert inspect.getsource(wrapper) == inspect.getsource(scaled)
    assert inspect.getfile(inspect.unwrap(wrapper)) == __file__
    assert "function scaled" in repr(wrapper)
    shown = pydoc.render_doc(wrapper, renderer=pydoc.plaintext)
    assert f"scaled{inspect.signature(scaled)}" in shown
    assert "Multiplies and scales." in shown
    assert callable(wrapper)


def test_wraps_of_a_wrapper():
    """The options stay with the function that was wrapped, not with the one that wraps it."""
    wrapper = autocast(scaled, jnp.bfloat16)

    @functools.wraps(wrapper)
    def around(*args, **kwargs):
        return wrapper(*args, **kwargs)

    assert around.__name__ == "scaled"
    assert inspect.signature(around) == inspect.signature(scaled)
    assert autocast(around) != autocast(scaled)
    assert_dots_run_in("bfloat16", trace(around, X))

    @functools.wraps(scaled)
    def other(x):
        return x @ x @ x

    assert autocast(other) != autocast(scaled)
    np.testing.assert_array_equal(autocast(other)(X), X @ X @ X)


def test_methods():
    layer = Layer(2.0)
    assert inspect.signature(layer.apply) == inspect.Signature(
        [inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    assert layer.apply == layer.apply
    assert layer.apply != Layer(2.0).apply
    for fn in (layer.apply, functools.partial(Layer.apply, layer), Layer.square, layer.square):
        assert_dots_run_in("bfloat16", trace(fn, X))
    assert isinstance(Layer.apply, type(decorated))
    assert decorated.__doc__ == "Says what it does."


# --- parameters and options --------------------------------------------------------------------


@dataclasses.dataclass
class Unhashable:
    """Compared by value, so without a hash."""

    scale: float

    def __call__(self, x):
        return self.scale * (x @ W)


def test_a_callable_without_hash_is_told_apart_by_identity():
    first, second = Unhashable(2.0), Unhashable(2.0)
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)
    assert hash(autocast(first)) == hash(autocast(first))
    assert hash(autocast(first)) != hash(autocast(second))
    assert_dots_run_in("bfloat16", trace(jax.jit(autocast(first)), W))


def biased(x, weights):
    return x @ weights["w"] + weights["b"]


# A bias that is data has a say, so that the sum is float32; a bias that is a parameter has none.
HOLDERS = {
    "no parameters": ((), "float32"),
    "inferred": (None, "bfloat16"),
    "argument 0": (0, "float32"),
    "argument 1": (1, "bfloat16"),
    "the last": (-1, "bfloat16"),
    "the last but one": (-2, "float32"),
    "all": ((0, -1), "bfloat16"),
    "a predicate": (lambda path: path == "1/b", "bfloat16"),
}


@pytest.mark.parametrize(("params", "dtype"), HOLDERS.values(), ids=HOLDERS)
def test_where_the_parameters_are(params, dtype):
    low = autocast(biased, jnp.bfloat16, params=params, output_dtype="computed")
    assert low(W, {"w": W, "b": W[0]}).dtype == dtype


def test_wrappers_of_other_options_are_not_equal():
    options = [
        {},
        {"policy": jnp.bfloat16},
        {"params": ()},
        {"output_dtype": "computed"},
        {"enabled": False},
    ]
    wrappers = [autocast(biased, **given) for given in options]
    for i, one in enumerate(wrappers):
        assert [one == other for other in wrappers] == [i == k for k in range(len(options))]
        assert one is autocast(biased, **options[i])


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments(static):
    fn = autocast(lambda x, n: sum(x @ x for _ in range(n)))
    traced = jax.jit(fn, **static).trace(X, n=3)
    assert_dots_run_in("bfloat16", traced.jaxpr)
    assert traced.out_info == jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert len(find(traced.jaxpr, "dot_general")) == 3
