"""What the tests of PyTorch's ops share: arrays, and running functions of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import autocast

DTYPES = ["bfloat16", "float16"]


def arrays(shapes):
    """Float32 arrays between 0.1 and 0.9, in the domain of every op here, using all 24 bits.

    NumPy's, as JAX compiles every operation anew while it checks for leaks.
    """
    rng = np.random.default_rng(0)
    return [rng.uniform(0.1, 0.9, shape).astype(np.float32) for shape in shapes]


def cast(xs, dtype):
    return [x.astype(jnp.dtype(dtype)) for x in xs]


def rounded(xs, dtype):
    """Float32 arrays of values that ``dtype`` has."""
    return cast(cast(xs, dtype), "float32")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=0.5), jnp.float32)


def computed(fn, dtype="bfloat16", **options):
    return autocast(fn, dtype, output_dtype="computed", **options)


def out_dtypes(fn, *args):
    return [x.dtype.name for x in jax.tree.leaves(jax.eval_shape(fn, *args))]


def result_dtype(fn, *args):
    return out_dtypes(fn, *args)[0]


# XLA takes longer for 240 functions in one program than in 16: a test of them all took 9.1 CPU
# seconds in place of 8.6.
AT_ONCE = 15


def run_all(fns, args):
    """Runs many functions in a few compilations that round wherever the program does."""
    options = {"xla_allow_excess_precision": False}
    outputs = []
    for i in range(0, len(fns), AT_ONCE):
        some, their = fns[i : i + AT_ONCE], args[i : i + AT_ONCE]
        program = jax.jit(lambda args, fns=some: [f(*xs) for f, xs in zip(fns, args, strict=True)])
        outputs += program.lower(their).compile(compiler_options=options)(their)
    return [np.asarray(out) for out in outputs]
