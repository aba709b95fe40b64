"""Contractions of all kinds, as accumulating ones, and the transforms to put around them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_autocast.interpreters.primitives.accumulate import accumulating_contraction

from .jaxprs import DOTS, trace

FLOAT32 = jnp.float32


def dot(lhs, rhs, contract, batch=((), ())):
    """A row of the table: the shapes of the operands and the operation in the plain form."""
    return lhs, rhs, lambda x, y: lax.dot_general(x, y, (contract, batch))


def conv(lhs, rhs, padding="SAME", **params):
    params.setdefault("window_strides", (1,) * (len(lhs) - 2))
    return lhs, rhs, lambda x, y: lax.conv_general_dilated(x, y, padding=padding, **params)


def ragged(lhs, rhs, sizes):
    return lhs, rhs, lambda x, y: lax.ragged_dot(x, y, np.array(sizes, np.int32))


NHWC = ("NHWC", "HWIO", "NHWC")
TABLE = {
    "matmul": dot((4, 16), (16, 8), ((1,), (0,))),
    "both_transposed": dot((16, 4), (8, 16), ((0,), (1,))),
    "matvec": dot((4, 16), (16,), ((1,), (0,))),
    "vecdot": dot((16,), (16,), ((0,), (0,))),
    "outer": dot((4,), (8,), ((), ())),
    "dense": dot((4, 8, 16), (16, 8), ((2,), (0,))),
    "two_contracted": dot((4, 8, 16), (16, 8, 2), ((1, 2), (1, 0))),
    "batch": dot((2, 4, 16), (2, 8, 16), ((2,), (2,)), ((0,), (0,))),
    "two_batch": dot((2, 4, 3, 16), (2, 8, 3, 16), ((3,), (3,)), ((0, 2), (0, 2))),
    "batch_last": dot((4, 16, 2), (16, 8, 2), ((1,), (0,)), ((2,), (2,))),
    "batch_and_two": dot((2, 4, 8, 2), (2, 8, 2, 4), ((2, 3), (1, 2)), ((0,), (0,))),
    "only_batch": dot((4,), (4,), ((), ()), ((0,), (0,))),
    "empty": dot((4, 0), (0, 8), ((1,), (0,))),
    "conv1d": conv((2, 4, 16), (4, 4, 3)),
    "conv2d": conv((2, 8, 8, 4), (3, 3, 4, 4), dimension_numbers=NHWC),
    "conv3d": conv((1, 2, 4, 4, 4), (2, 2, 3, 3, 3), "VALID"),
    "strides": conv((2, 4, 8, 9), (4, 4, 3, 2), window_strides=(2, 3)),
    "lhs_dilation": conv((2, 4, 5, 5), (4, 4, 3, 3), ((1, 1), (2, 0)), lhs_dilation=(2, 3)),
    "rhs_dilation": conv((2, 4, 9, 9), (4, 4, 3, 3), "VALID", rhs_dilation=(2, 3)),
    "groups": conv((2, 4, 6, 6), (6, 2, 3, 3), feature_group_count=2),
    "depthwise": conv((2, 4, 6, 6), (8, 1, 3, 3), feature_group_count=4, window_strides=(2, 2)),
    "batch_groups": conv((4, 4, 6, 6), (6, 4, 3, 3), batch_group_count=2),
    "negative_padding": conv((2, 4, 8, 8), (4, 4, 3, 3), ((-1, 2), (1, -2))),
    "ragged": ragged((8, 16), (3, 16, 4), (3, 1, 4)),
}


def accumulating(plain, dtype, out=FLOAT32, leaf=True):
    """The operation on two float32 arrays: the left is cast before, the right is a leaf."""

    def function(x, w):
        jaxpr = trace(plain, x, w)
        env = dict(zip(jaxpr.jaxpr.invars, (x, w), strict=True))
        env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        for eqn in jaxpr.jaxpr.eqns:
            lhs, *rest = (env[v] for v in eqn.invars)
            if eqn.primitive.name in DOTS:
                full = rest.pop(0)
                env[eqn.outvars[0]] = accumulating_contraction(
                    eqn.primitive,
                    eqn.params,
                    lhs.astype(dtype),
                    full.astype(dtype),
                    *rest,
                    out=out,
                    full=(None, full if leaf else None),
                )
            else:  # inside of a shard_map
                env[eqn.outvars[0]] = eqn.primitive.bind(lhs, **eqn.params)
        return env[jaxpr.jaxpr.outvars[0]]

    return function


def arguments(row, low=None, seed=0):
    """Random values that are exact in ``low``; without it integers, exact in any product here."""
    random = np.random.default_rng(seed)
    if low is None:
        return [random.integers(-1, 2, shape).astype(np.float32) for shape in row[:2]]
    draw = [random.standard_normal(shape).astype(low) for shape in row[:2]]
    return [x.astype(np.float32) for x in draw]


def quadratic(f):
    """Exact in 16 bits, with all its derivatives, for the integers of `arguments`."""
    return lambda x, w: jnp.sum(jnp.square(f(x, w).astype(FLOAT32)))


def hvp(f):
    gradient = lambda x, w: jax.grad(f, 1)(x, w)
    return lambda x, w: jax.grad(lambda w: jnp.sum(gradient(x, w) * (1 - w)))(w)


def mixed_hvp(f):
    gradient = lambda x, w: jax.grad(f, 1)(x, w)
    return lambda x, w: jax.grad(lambda x: jnp.sum(gradient(x, w) * (1 - w)))(x)


def batch_of(x):
    return jnp.stack([x, 1 - x, -x], axis=1)


def vmapped(f, in_axes):
    """Along axis 1, so that the batch dimension is not where it would be anyway."""
    pick = lambda x, axis: x if axis is None else batch_of(x)
    return lambda x, w: jax.vmap(f, in_axes)(pick(x, in_axes[0]), pick(w, in_axes[1]))


def scanned(f):
    def loop(x, w):
        step = lambda total, x: (total + f(x, w), None)
        return lax.scan(step, jnp.float32(0), jnp.stack([x, -x]))[0]

    return jax.grad(loop, (0, 1))


TRANSFORMS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (1 - x, 1 - w)),
    "hvp": hvp,
    "mixed_hvp": mixed_hvp,
    "forward_over_reverse": lambda f: lambda x, w: jax.jvp(jax.grad(f, 1), (x, w), (x, w)),
    "vmap_lhs": lambda f: vmapped(f, (1, None)),
    "vmap_rhs": lambda f: vmapped(f, (None, 1)),
    "vmap_both": lambda f: vmapped(f, (1, 1)),
    "vmap_of_grad": lambda f: vmapped(jax.grad(f, (0, 1)), (1, None)),
    "vmap_of_grad_over_leaves": lambda f: vmapped(jax.grad(f, (0, 1)), (None, 1)),
    "grad_of_vmap": lambda f: jax.grad(lambda x, w: vmapped(f, (1, 1))(x, w).sum(), (0, 1)),
    "vmap_of_vmap": lambda f: vmapped(vmapped(jax.grad(f, 1), (1, None)), (None, 1)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "grad_of_jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "scan": scanned,
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, w),
}
