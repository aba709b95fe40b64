"""Functions that pickles of `test_pickle.py` name, and what a fresh process reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_autocast import CastPolicy, Decision, autocast
from jmp_autocast.integrations import nnx as nnx_integration

from .jaxprs import dot_dtypes, trace


def double(x):
    return 2 * (x @ x)


def small_stays_full(eqn):
    return CastPolicy.FP32 if eqn.flops < 20 else CastPolicy.LOWER_PRECISION_FP


def emit_double(eqn):
    return Decision(emit=double)


def is_weight(path):
    return path.endswith("w")


@autocast(policy=jnp.bfloat16)
def decorated(x):
    """Says what it does."""
    return x @ x


@nnx_integration.autocast(policy=jnp.bfloat16)
def decorated_nnx(model, x):
    return model(x)


class Layer:
    """Decorated methods of each kind."""

    def __init__(self, scale=3.0):
        self.scale = scale

    @autocast
    def apply(self, x):
        return self.scale * (x @ x)

    @staticmethod
    @autocast
    def square(x):
        return x @ x


def default_floats(x):
    """New arrays and Python numbers: float64 in the mode of 64 bits."""
    grid = jnp.linspace(0, 1, 8)
    table = jnp.zeros((8, 8)) + 0.5
    return (x @ x) * 2.0, table @ table + grid, jnp.asarray(1.0), x.astype(float) @ table


def report(*fns):
    """In a fresh process: its mode, and per function the dtypes of dots and that types hold."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    wide = jax.ShapeDtypeStruct((8, 8), np.float64)
    programs = [(fn, x) for fn in fns] + [(autocast(default_floats), x), (autocast(double), wide)]
    dots = [dot_dtypes(trace(fn, arg)) for fn, arg in programs]
    plain = functools.partial(jax.eval_shape, default_floats, x)
    same = plain() == jax.eval_shape(autocast(default_floats), x)
    return jax.config.jax_enable_x64, dots, same


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))
