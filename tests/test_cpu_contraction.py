"""XLA:CPU runs every form of a 16-bit contraction with a float32 result, whatever is around it.

`jax.lax.dot_general` alone fails in several of these rows ("Unsupported element type for
DotThunk::Execute"): XLA:CPU merges the transpositions around it into a form that it cannot run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast.interpreters.cpu_contraction import contract_on_cpu

from .jaxprs import find, trace

# Shapes and dimension numbers: (contracting, batch) dimensions of the two operands.
FORMS = {
    "last_first": ((16, 64), (64, 32), (((1,), (0,)), ((), ()))),
    "last_last": ((16, 64), (32, 64), (((1,), (1,)), ((), ()))),
    "first_first": ((64, 16), (64, 32), (((0,), (0,)), ((), ()))),
    "first_last": ((64, 16), (32, 64), (((0,), (1,)), ((), ()))),
    "two_contracted": ((2, 32, 16), (2, 32, 48), (((0, 1), (0, 1)), ((), ()))),
    "two_crossed": ((2, 32, 16), (32, 2, 48), (((1, 0), (0, 1)), ((), ()))),
    "two_apart": ((2, 16, 32), (2, 48, 32), (((0, 2), (0, 2)), ((), ()))),
    "one_row_of_two": ((1, 64, 16), (1, 64, 48), (((0, 1), (0, 1)), ((), ()))),
    "middle": ((2, 64, 16), (64, 3), (((1,), (0,)), ((), ()))),
    "batch": ((3, 64, 16), (3, 64, 48), (((1,), (1,)), ((0,), (0,)))),
    "batch_last": ((64, 16, 3), (64, 48, 3), (((0,), (0,)), ((2,), (2,)))),
    "vector": ((64,), (64, 16), (((0,), (0,)), ((), ()))),
    "inner": ((64,), (64,), (((0,), (0,)), ((), ()))),
    "outer": ((16,), (24,), (((), ()), ((), ()))),
    "one_term": ((16, 1), (1, 24), (((1,), (0,)), ((), ()))),
    "one_column": ((64, 16), (64, 1), (((0,), (0,)), ((), ()))),
    "no_term": ((16, 0), (0, 24), (((1,), (0,)), ((), ()))),
    "no_row": ((64, 0), (64, 24), (((0,), (0,)), ((), ()))),
}
AROUND = {
    "nothing": lambda dot: dot,
    "transposed_result": lambda dot: lambda x, y: jnp.transpose(dot(x, y)),
    "rounded_transposed_result": lambda dot: (
        lambda x, y: jnp.transpose(dot(x, y)).astype(x.dtype).astype(jnp.float32)
    ),
    "transposed_operands": lambda dot: lambda x, y: dot(transposed(x), transposed(y)),
}


def transposed(x):
    """A transposition of something of the same shape that was computed."""
    return jnp.transpose(jnp.flip(jnp.transpose(x)))


def contracted(form, x, y):
    params = {
        "dimension_numbers": form[2],
        "precision": None,
        "preferred_element_type": np.dtype("float32"),
        "out_sharding": None,
    }
    return contract_on_cpu(lax.dot_general_p, params, x, y)


def operands(form, dtype):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in form[:2]]


@pytest.mark.parametrize(
    ("around", "dtype"), [*((name, "bfloat16") for name in AROUND), ("nothing", "float16")]
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_against_float32(jit_caches, form, around, dtype):
    x, y = operands(form, dtype)
    found = jax.jit(AROUND[around](functools.partial(contracted, form)))(x, y)
    wide = lambda x, y: lax.dot_general(x.astype(jnp.float32), y.astype(jnp.float32), form[2])
    expected = AROUND[around](wide)(x, y)
    assert found.dtype == expected.dtype == jnp.float32
    tolerance = 1e-2 if around == "rounded_transposed_result" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [n for n in FORMS if "batch" not in n])
def test_a_bfloat16_matmul_is_not_widened(name):
    jaxpr = trace(functools.partial(contracted, FORMS[name]), *operands(FORMS[name], "bfloat16"))
    (eqn,) = find(jaxpr, "dot_general")
    assert [v.aval.dtype.name for v in eqn.invars] == ["bfloat16", "bfloat16"]
    assert eqn.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
