"""Programs with stored parameters: they return what they return with the original ones."""

import jax
import numpy as np

from jmp_autocast.backend import EVERY_ROUNDING
from jmp_autocast.optimizers import as_float32


def assert_same_results(program, small, params, *args):
    """Raises unless a program returns the same bits for stored parameters, read as float32.

    If XLA left out a rounding, equal programs would have different results.
    """
    run = jax.jit(lambda p: program(as_float32(p), *args), compiler_options=EVERY_ROUNDING)
    jax.tree.map(_assert_same_bits, run(small), run(params))


def _assert_same_bits(one, other):
    if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    assert one.dtype == other.dtype
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
