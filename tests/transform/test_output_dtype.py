"""`output_dtype`: one dtype for all float outputs, what was computed, or what is declared."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, Policy, autocast

W, X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(0.0, 3.0, 16).reshape(2, 8)


def step(params, x):
    h = x @ params["w"]
    return jax.nn.softmax(h), {"k": jnp.exp(h), "count": jnp.int32(3)}


def test_one_dtype_is_for_all_float_outputs():
    out = jax.eval_shape(autocast(step, BF16, output_dtype="float16"), {"w": W}, X)
    assert [x.dtype.name for x in jax.tree.leaves(out)] == "float16 int32 float16".split()


def test_same_stands_for_the_output_dtype_of_the_policy():
    policy = Policy("bfloat16", output_dtype="float16")
    out = jax.eval_shape(autocast(step, policy), {"w": W}, X)
    assert [x.dtype.name for x in jax.tree.leaves(out)] == "float16 int32 float16".split()


@pytest.mark.parametrize("wanted", [("same", "bfloat16"), {"a": "same"}, None, "int8", "float64"])
def test_a_tree_of_dtypes_is_refused(wanted):
    with pytest.raises(ValueError, match=r"output_dtype must be .*, got .*in the function"):
        autocast(step, BF16, output_dtype=wanted)
