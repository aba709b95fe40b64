"""Products of floats and numbers in one equation: planned as if the number were cast."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, FP16, Float8, Policy, autocast, explain
from tests.support.jaxprs import trace

W = jax.random.normal(jax.random.key(0), (64, 48))
ROWS = jax.random.randint(jax.random.key(1), (16, 64), 0, 2)


# JAX promotes such a product itself.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def product(w, x):
    return x @ w


def row_of(fn, *args, policy=BF16):
    (row,) = [r for r in explain(fn, *args, policy=policy).rows if r.primitive == "dot_general"]
    return row


def test_jax_traces_one_equation():
    (eqn,) = trace(product, W, ROWS.astype(jnp.int8)).jaxpr.eqns
    assert [v.aval.dtype.name for v in eqn.invars] == ["int8", "float32"]


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["tensor_cores", "o1", "compute"])
@pytest.mark.parametrize("dtype", [bool, jnp.int8, jnp.uint8, jnp.int16, jnp.int32])
def test_a_number_is_multiplied_in_16_bits(dtype, level, policy):
    x, dtypes = ROWS.astype(dtype), (policy.compute_dtype.name,) * 2
    row = row_of(product, W, x, policy=dataclasses.replace(policy, level=level))
    assert (row.operands, row.reason) == (dtypes, "LOWER_PRECISION")
    found = autocast(product, policy=dataclasses.replace(policy, level=level))(W, x)
    assert found.dtype == jnp.float32
    chex.assert_trees_all_close(found, product(W, x), rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_gradient_is_the_accumulator(swapped):
    # 257 ones: no sum in bfloat16 is 257.
    x = jnp.ones((257, 8), bool)
    loss = lambda w: jnp.sum((w.T @ x.T if swapped else x @ w) * 1.0)
    found = jax.grad(autocast(loss, policy=BF16))(jnp.ones((8, 3)))
    chex.assert_trees_all_equal(found, jnp.full((8, 3), 257.0))


def test_positions_stay_float32_and_the_user_is_told():
    x, w = jnp.arange(3 * 4096).reshape(4096, 3), jax.random.normal(jax.random.key(0), (3, 64))
    angles = lambda w, x: x @ (w @ jnp.eye(64))
    with pytest.warns(UserWarning, match="holds integers"):
        found = autocast(angles, policy=BF16)(w, x)
    chex.assert_trees_all_close(found, angles(w, x), rtol=2e-2, atol=100)
    rows = explain(angles, w, x, policy=BF16).rows
    assert [r.reason for r in rows if r.primitive == "dot_general"] == ["LOWER_PRECISION", "COORD"]


def test_a_result_that_is_no_float_keeps_its_dtype():
    x = ROWS.astype(jnp.int8)
    cast = autocast(lambda w: jnp.matmul(x, w, preferred_element_type=jnp.int32), policy=BF16)
    assert jax.eval_shape(cast, W).dtype == cast(W).dtype == jnp.int32


def test_with_weights_in_8_bits_the_product_is_in_16():
    policy = Policy(jnp.bfloat16, matmul=Float8(emulate=True, skip=()))
    assert row_of(product, W, ROWS.astype(jnp.int8), policy=policy).operands == ("bfloat16",) * 2
