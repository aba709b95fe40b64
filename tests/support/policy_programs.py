"""Programs that are rewritten under a policy, and the dtypes of their equations."""

import numpy as np

from jmp_autocast import BF16, autocast

from .jaxprs import dtypes, find, trace

X = np.ones((8, 8), np.float32)
LOW, FULL = "bfloat16", "float32"


def rewritten(fn, *args, policy=BF16):
    return trace(autocast(fn, policy=policy, output_dtype="computed"), *args)


def io(jaxpr, name):
    """(operand dtypes, result dtypes) of the one equation of a primitive."""
    (eqn,) = find(jaxpr, name)
    return dtypes(eqn.invars), dtypes(eqn.outvars)


def after_dot(function):
    """A function of a value that is computed in the compute dtype."""
    return lambda x: function(x @ x)
