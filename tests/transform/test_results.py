"""The results of a function: their dtypes by `output_dtype`, and objects besides arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, Policy, autocast

X = jnp.eye(4)


class Model:
    def __init__(self, w):
        self.w = w @ w


class Nested:
    def __init__(self, w):
        self.parts = [{"model": Model(w)}]


@dataclasses.dataclass
class Plain:
    w: object


HOLD_ARRAYS = {
    "a class": Model,
    "a class inside": Nested,
    "a dataclass": lambda w: (w, Plain(w @ w)),
}


@pytest.mark.parametrize("name", HOLD_ARRAYS)
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["called", "jit"])
def test_an_object_with_arrays_is_refused(name, run):
    with pytest.raises(TypeError, match=r"not a valid JAX type\. Return arrays in a pytree"):
        run(autocast(HOLD_ARRAYS[name], policy=BF16))(X)


def test_an_object_without_arrays_is_returned():
    word, function, settings = autocast(lambda w: ("a word", jnp.sin, Plain(3)), policy=BF16)(X)
    assert (word, function, settings) == ("a word", jnp.sin, Plain(3))


W, ROWS = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(0.0, 3.0, 16).reshape(2, 8)


def step(params, x):
    h = x @ params["w"]
    return jax.nn.softmax(h), {"k": jnp.exp(h), "count": jnp.int32(3)}


def test_one_dtype_is_for_all_float_outputs():
    out = jax.eval_shape(autocast(step, BF16, output_dtype="float16"), {"w": W}, ROWS)
    assert [x.dtype.name for x in jax.tree.leaves(out)] == "float16 int32 float16".split()


def test_same_stands_for_the_output_dtype_of_the_policy():
    policy = Policy("bfloat16", output_dtype="float16")
    out = jax.eval_shape(autocast(step, policy), {"w": W}, ROWS)
    assert [x.dtype.name for x in jax.tree.leaves(out)] == "float16 int32 float16".split()


@pytest.mark.parametrize("wanted", [("same", "bfloat16"), {"a": "same"}, None, "int8", "float64"])
def test_a_tree_of_dtypes_is_refused(wanted):
    with pytest.raises(ValueError, match=r"output_dtype must be .*, got .*in the function"):
        autocast(step, BF16, output_dtype=wanted)
