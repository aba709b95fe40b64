"""A wrapper looks like its function: to `inspect`, `help`, `functools` and as a method."""

import functools
import inspect
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast
from jmp_autocast.integrations import nnx as nnx_integration
from tests.support.jaxprs import assert_dots_run_in, trace
from tests.support.pickled_functions import Layer, decorated

X = np.ones((4, 4), np.float32)
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


@pytest.mark.parametrize("cast", CASTS, ids=["autocast", "nnx"])
def test_partial(cast):
    inside, outside = cast(functools.partial(scaled, scale=5.0)), functools.partial(cast(scaled))
    assert inspect.signature(inside) == inspect.signature(functools.partial(scaled, scale=5.0))
    for fn in (inside, functools.partial(outside, scale=5.0)):
        assert_dots_run_in("float16", trace(fn, X))
        np.testing.assert_array_equal(fn(X), 5 * X @ X)


def test_wraps_of_a_wrapper():
    """The options stay with the function that was wrapped, not with the one that wraps it."""
    wrapper = autocast(scaled, compute_dtype=jnp.bfloat16)

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
        assert_dots_run_in("float16", trace(fn, X))
    assert decorated.__doc__ == "Says what it does."
