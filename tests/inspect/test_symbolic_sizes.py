"""Reports of programs with the symbolic lengths of `jax.export`, which count as 128."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import BF16, explain


def attention(w, x):
    return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) @ x.T) @ x)


def recurrent(w, x):
    """A loop of a symbolic length."""

    def step(h, row):
        return jnp.tanh(h @ w + row), jnp.exp(-h)

    return jnp.sum(lax.scan(step, jnp.zeros(16, x.dtype), x)[1])


of_models = pytest.mark.parametrize("model", [attention, recurrent])

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
SYMBOLIC = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 16"), jnp.float32)
CONCRETE = jax.ShapeDtypeStruct((128, 16), jnp.float32)


def without_sizes(report):
    """The lines of a report, without that of sizes."""
    return [line for line in str(report).splitlines() if not line.startswith("sizes ")]


@of_models
def test_explain_counts_them_and_says_so(model):
    found, concrete = (explain(model, W, x, policy=BF16) for x in (SYMBOLIC, CONCRETE))
    assert found.totals == concrete.totals
    assert found.by_dtype() == concrete.by_dtype()
    assert without_sizes(found) == without_sizes(concrete)
    assert "\nsizes       symbolic lengths count as 128\n" in str(found)
    assert "sizes " not in str(concrete)
