"""Levels: how much of a program is lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import FP16, Policy, autocast
from tests.support.jaxprs import assert_dots_run_in, casts, find, trace

X = np.ones((4, 8), np.float32)
W = np.ones((8, 8), np.float32)


def block(w, x):
    hidden = jnp.tanh(x @ w)
    x = x + (hidden @ w).reshape(2, 2, 8).reshape(4, 8)
    return (x * jnp.sin(x)) @ w


def names_of(jaxpr, dtype):
    """The primitives with a float result in ``dtype``, casts and views aside."""
    return {
        eqn.primitive.name.replace("accumulate", "dot_general")
        for eqn in jaxpr.jaxpr.eqns
        if eqn.outvars[0].aval.dtype == dtype
        and eqn.primitive.name not in ("convert_element_type", "source_view")
    }


LEVELS = {
    "tensor_cores": ({"dot_general", "reshape"}, {"tanh", "add", "sin", "mul"}),
    "o1": ({"dot_general", "reshape", "tanh"}, {"add", "sin", "mul"}),
    "compute": ({"dot_general", "reshape", "tanh", "add", "sin", "mul"}, set()),
}


@pytest.mark.parametrize(("level", "expected"), LEVELS.items(), ids=LEVELS)
def test_what_is_lowered(level, expected):
    fn = autocast(block, policy=Policy(jnp.bfloat16, level=level), output_dtype="computed")
    jaxpr = trace(fn, W, X)
    assert (names_of(jaxpr, jnp.bfloat16), names_of(jaxpr, jnp.float32)) == expected
    assert_dots_run_in("bfloat16", jaxpr)


def test_full_size_inputs_of_level_compute_are_cast_once():
    fn = autocast(
        lambda w, x: (x @ w + x) * x, policy=Policy(jnp.bfloat16, level="compute"), params=0
    )
    assert len(casts(trace(fn, W, X), "float32", "bfloat16")) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_scale_and_mask_before_softmax_are_float32(level):
    def attention(w, x):
        scores = x @ w / 8 + jnp.where(x > 0, 0.0, -1e9)
        return jax.nn.softmax(scores) @ w

    jaxpr = trace(autocast(attention, policy=Policy(jnp.bfloat16, level=level)), W, X)
    for name in ("div", "add", "sub", "exp", "reduce_sum"):
        assert {e.outvars[0].aval.dtype.name for e in find(jaxpr, name)} == {"float32"}


def test_a_gate_keeps_its_operands_in_16_bits():
    """Raised, the product of two activations would keep both in float32 for the backward pass.

    Where more than a float32 sum reads it, its digits count for more: a cosine, a logarithm.
    """

    def dtype_of_product(read):
        def fn(w, x):
            gate, value = jax.nn.sigmoid(x @ w), jnp.tanh(x @ w)
            return read(gate * value, jnp.exp(x))

        (product,) = find(trace(autocast(fn, jnp.bfloat16), W, X), "mul")
        return product.outvars[0].aval.dtype

    assert dtype_of_product(lambda product, state: (state + product) @ W) == jnp.bfloat16
    assert dtype_of_product(lambda product, state: state - product) == jnp.float32
    assert dtype_of_product(lambda product, state: jnp.sum(product)) == jnp.float32
    assert dtype_of_product(lambda product, state: jnp.exp(product) + product) == jnp.float32


def test_an_activation_is_narrowed_once_and_early():
    """exp -> reshape -> two dots: one cast, of the smaller count of values, before they part."""

    def fn(w, x):
        y = jnp.exp(x)
        return y.reshape(2, 16).reshape(4, 8) @ w, y.T @ y

    jaxpr = trace(autocast(fn, jnp.bfloat16, params=0), W, X)
    (exp,) = find(jaxpr, "exp")
    down = [e for e in casts(jaxpr, "float32", "bfloat16") if e.invars[0] is exp.outvars[0]]
    assert len(down) == 1
    assert len(casts(jaxpr, "float32", "bfloat16")) == 2  # and the weight


def test_a_literal_that_does_not_fit_is_not_narrowed():
    fn = autocast(lambda w, x: jnp.maximum(jnp.exp(x), 1e-8) @ w, policy=FP16, params=0)
    (maximum,) = find(trace(fn, W, X), "max")
    assert maximum.outvars[0].aval.dtype == jnp.float32
