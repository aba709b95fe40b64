"""A program to run with and without autocast: how it is made, and what may differ."""

import dataclasses
import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import autocast


def with_autocast(fn, dtype):
    return autocast(fn, dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of others.

    Attributes:
        build: From a `Draw` to the function and its arguments.
        grad: The arguments to differentiate.
        solver: The relative tolerance that the program asks of an iterative or adaptive solver,
            whose answer may differ by as much whenever it takes other steps.
        cast: From the function and the compute dtype to the function under autocast.
    """

    build: Callable
    grad: tuple[int, ...] = (0,)
    solver: float = 0
    cast: Callable = with_autocast


class Table(dict):
    """Programs by name."""

    def add(self, **options):
        """Registers a function as the ``build`` of the program with its name."""

        def register(build):
            self[build.__name__.replace("_", " ")] = Program(build, **options)
            return build

        return register


class Draw:
    """Random float32 arrays, the same for a program's name each time."""

    def __init__(self, name):
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *shape, scale=1.0):
        """Normal numbers."""
        return float32(scale * self.rng.normal(size=shape))

    def positive(self, *shape):
        """Numbers between 0.5 and 2."""
        return float32(np.exp2(self.rng.uniform(-1, 1, size=shape)))

    def integers(self, high, *shape):
        return jax.device_put(np.asarray(self.rng.integers(0, high, size=shape), np.int32))

    def filled(self, init, *args):
        """What an initialization returns, with weights of its shapes: without compiling it."""
        return self.arrays(jax.eval_shape(init, *args))

    def arrays(self, shapes):
        """Weights of these shapes; variances are positive, integers zero."""

        def leaf(path, x):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return jnp.zeros(x.shape, x.dtype)
            if "var" in jax.tree_util.keystr(path[-1:]):
                return self.positive(*x.shape)
            return self(*x.shape, scale=max(1, np.prod(x.shape[:-1])) ** -0.5)

        return jax.tree_util.tree_map_with_path(leaf, shapes)


def float32(x):
    """An array of JAX, without `jnp.asarray`, which compiles a program for each shape."""
    return jax.device_put(np.asarray(x, np.float32))


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(tree):
    """The float leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if is_float(x)]


def value_and_gradient(program, fn):
    """A function of arguments and cotangents that returns what ``fn`` does, and derivatives."""

    def run(args, directions):
        def of(*chosen):
            given = dict(zip(program.grad, chosen, strict=True))
            out = fn(*(given.get(i, arg) for i, arg in enumerate(args)))
            return floats(out), out

        chosen = tuple(args[i] for i in program.grad)
        _, pullback, out = jax.vjp(of, *chosen, has_aux=True)
        return out, floats(pullback(directions))

    return run


def directions_of(fn, args, draw):
    return [draw(*x.shape).astype(x.dtype) for x in floats(jax.eval_shape(fn, *args))]


COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,  # or a 16-bit value may be a float32 one
    "xla_backend_optimization_level": 0,  # compiling takes longer than running
}
if jax.__version_info__ < (0, 12):  # which has no such option any more
    COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = False  # the same


class Traced:
    """A function's jaxpr, and what it returns."""

    def __init__(self, fn, *args):
        self.traced = jax.jit(fn).trace(*args)
        self.jaxpr = self.traced.jaxpr
        self.avals = self.jaxpr.out_avals
        self.tree = jax.tree.structure(self.traced.out_info)

    @functools.cached_property
    def compiled(self):
        return self.traced.lower().compile(compiler_options=COMPILER_OPTIONS)

    def __call__(self, *args):
        return jax.tree.map(np.asarray, self.compiled(*args))
