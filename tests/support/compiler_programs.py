"""Small programs in the manner of the compilers' own tests, and how they are cast."""

import numpy as np
from jax import lax

from jmp_autocast import Policy, autocast

from .jaxprs import DOTS, find

DTYPES = ["bfloat16", "float16"]
LEVELS = ["tensor_cores", "o1", "compute"]
COMBINATIONS = [*(("bfloat16", level) for level in LEVELS), ("float16", "o1")]


def cast(fn, dtype="bfloat16", level="o1", **options):
    """``fn`` under autocast at a level."""
    return autocast(fn, policy=Policy(dtype, level=level), **options)


def of(*shape, seed=0):
    """Normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def result_dtypes(jaxpr, *names):
    """The dtypes of the first results of the equations of the given primitives, in order."""
    return [eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, *names)]


def all_casts(jaxpr):
    """(from, to) of each cast, in order."""
    return [
        (eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name)
        for eqn in find(jaxpr, "convert_element_type")
        if eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype
    ]


def mixed_dots(jaxpr):
    """Products whose operands differ in dtype, or that a float32 cotangent meets."""
    return [
        eqn for eqn in find(jaxpr, *DOTS) if eqn.invars[0].aval.dtype != eqn.invars[1].aval.dtype
    ]
