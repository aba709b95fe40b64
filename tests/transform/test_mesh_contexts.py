"""Weights that are consumed under another mesh context than that in which they were made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    auto_axes,
    explicit_axes,
)

from jmp_autocast import BF16, autocast
from tests.support.jaxprs import assert_dots_run_in, trace
from tests.support.numerics import draw, relative_error

IDS = np.array([0, 3, 1, 5])
LOADED = draw(0, 8, 8) / 3
X = draw(1, 8, 8)


def by_rows(f):
    return auto_axes(f, out_sharding=P("d", None))


def dense(x, w):
    return jnp.tanh(x @ w)


EXPLICIT = {
    "lookup": lambda w, x: x @ w.at[IDS].get(out_sharding=P(None, None)).T @ w[:4],
    "lookup beside": lambda w, x: w.at[IDS].get(out_sharding=P(None, None)) @ (w * 2.0),
    "auto_axes": lambda w, x: by_rows(dense)(x, w),
    "auto_axes beside": lambda w, x: by_rows(dense)(x, w) @ w,
    "sort of a product": lambda w, x: by_rows(lambda a: jnp.sort(a, 0))(x @ w) @ w,
}


def called(f):
    return f


def gradient(f):
    return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args)))))


def check(f, run, w, x):
    expected = run(f)(w, x)
    found = run(autocast(f, policy=BF16))(w, x)
    assert found.sharding == expected.sharding
    assert relative_error(found, expected) < 0.02
    assert_dots_run_in("bfloat16", trace(run(autocast(f, policy=BF16)), w, x))


@pytest.mark.parametrize("run", [called, jax.jit, gradient])
@pytest.mark.parametrize("is_placed", [True, False], ids=["on the mesh", "made before it"])
@pytest.mark.parametrize("name", EXPLICIT)
def test_under_explicit_axes(name, is_placed, run):
    w = jnp.asarray(LOADED)
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))):
        w = jax.device_put(w, P()) if is_placed else w
        check(EXPLICIT[name], run, w, jax.device_put(X, P("d", None)))


@pytest.mark.parametrize("run", [called, jax.jit, gradient])
def test_explicit_axes_under_automatic_ones(run):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    inside = explicit_axes(dense, in_sharding=(P("d", None), P()))
    with jax.set_mesh(mesh):
        w = jax.device_put(LOADED, NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        check(lambda w, x: inside(x, w) @ w, run, w, x)
