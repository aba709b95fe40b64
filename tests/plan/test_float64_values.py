"""float64 values pass through untouched, as integers do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, Policy, autocast, explain
from tests.support.jaxprs import floats_of, trace

SINGLE, DOUBLE = np.dtype("float32"), np.dtype("float64")
RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 8)) / 3
X = RNG.standard_normal((6, 8))

pytestmark = pytest.mark.usefixtures("float64")


def layer(w, x):
    return jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ w)) ** 2)


def recurrent(w, x):
    final, states = lax.scan(lambda h, row: (jnp.tanh(h @ w + row),) * 2, x[0], x)
    return lax.cond(final[0] > 0, jnp.sum, jnp.mean, states)


@pytest.mark.parametrize("fn", [layer, recurrent, jax.jit(layer), jax.grad(layer)])
@pytest.mark.parametrize("level", ["tensor_cores", "o1", "compute"])
def test_a_float64_program_is_the_program_itself(fn, level):
    mixed = autocast(fn, policy=Policy(jnp.bfloat16, level=level), output_dtype="computed")
    assert str(trace(mixed, W, X)) == str(trace(fn, W, X))


@pytest.mark.usefixtures("as_users_run_it")
def test_beside_float32_each_product_has_the_dtypes_of_its_operands():
    def both(w, x):
        low = jnp.tanh(x.astype("float32") @ w.astype("float32"))
        return x @ w, low @ low.T, low * x

    found = floats_of(trace(autocast(both, policy=BF16, output_dtype="computed"), W, X))
    assert found["dot_general"] == {DOUBLE, jnp.dtype("bfloat16")}
    # A product of both is float64, as JAX declares.
    assert found["mul"] == {DOUBLE}
    assert [out.dtype for out in autocast(both, policy=BF16)(W, X)] == [DOUBLE, SINGLE, DOUBLE]


def test_a_cast_to_float64_is_float64():
    rows = explain(lambda x: jnp.sum((x @ x.T).astype("float64")), np.float32(X), policy=BF16).rows
    assert [row.results for row in rows][-1] == ("float64",)
