"""A scatter has its update computation as a parameter, a jaxpr of a fixed dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, autocast
from tests.support.jaxprs import find, trace

INDICES = jnp.array([0, 1])
SCATTERS = {
    "scatter-add": lambda h: h.at[INDICES].add(h[2:]),
    "scatter-mul": lambda h: h.at[INDICES].multiply(h[2:], unique_indices=True),
    "scatter-max": lambda h: h.at[INDICES].max(h[2:]),
    "scatter-min": lambda h: h.at[INDICES].min(h[2:]),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_scatter_in_16_bits_has_an_update_computation_in_16_bits(name):
    """JAX lowers no maximum of float32 numbers for 16-bit operands."""
    fn = autocast(lambda x: SCATTERS[name](x @ x.T), BF16.with_rules({name: "bfloat16"}))
    x = np.arange(16, dtype=np.float32).reshape(4, 4) / 4
    (eqn,) = find(trace(fn, x), name)
    update = eqn.params["update_jaxpr"]
    atoms = (*eqn.outvars, *update.invars, *update.outvars)
    assert {v.aval.dtype.name for v in atoms} == {"bfloat16"}
    np.testing.assert_allclose(jax.jit(fn)(x), SCATTERS[name](jnp.array(x @ x.T)), rtol=0.02)
