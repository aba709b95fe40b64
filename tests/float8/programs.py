"""A layer, its loss and gradients, and what JAX does to layers: what the tests of recipes run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from tests.support.jaxprs import find
from tests.support.numerics import relative_error


def layer(w, x):
    return x @ w


def loss(fn):
    return lambda w, x: jnp.sum(jnp.sin(fn(w, x) / 4))


def with_gradients(fn):
    """Returns ``(w, x, cotangent) -> (y, dw, dx)``."""
    return jax.jit(lambda w, x, g: (lambda y, pull: (y, *pull(g)))(*jax.vjp(fn, w, x)))


def assert_derivatives_near(low, full, w, x):
    """The gradient of a loss, and the derivative of the loss along it, in forward mode."""
    found, exact = jax.jit(jax.grad(low))(w, x), jax.jit(jax.grad(full))(w, x)
    assert found.dtype == jnp.float32
    assert relative_error(found, exact) < 0.15
    tangent = jax.jit(lambda w: jax.jvp(lambda w: low(w, x), (w,), (exact,)))(w)[1]
    assert relative_error(tangent, np.vdot(exact, exact)) < 0.1


def over_layers(w, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, -w]))[0]


def over_layers_again(w, x):
    step = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None))
    return lax.scan(step, x, jnp.stack([w, -w]))[0]


def in_a_loop(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]


def again(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(w, x)


def through_shards(w, x):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh, **specs)(w, x)


def quantized(jaxpr):
    """The shapes of the arrays that are quantized."""
    casts = find(jaxpr, "convert_element_type")
    return sorted(e.outvars[0].aval.shape for e in casts if e.outvars[0].aval.dtype.itemsize == 1)
