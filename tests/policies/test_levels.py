"""Levels: how much of a program is lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, Policy, autocast
from tests.support.jaxprs import assert_dots_run_in, casts, find, trace

X = np.ones((4, 8), np.float32)
W = np.ones((8, 8), np.float32)


def block(w, x):
    hidden = jnp.tanh(x @ w)
    x = x + (hidden @ w).reshape(2, 2, 8).reshape(4, 8)
    return x * jnp.sin(x)


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
    fn = autocast(block, policy=BF16.with_level(level), output_dtype="computed")
    jaxpr = trace(fn, W, X)
    assert (names_of(jaxpr, jnp.bfloat16), names_of(jaxpr, jnp.float32)) == expected
    assert_dots_run_in("bfloat16", jaxpr)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients(level):
    key, other = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(key, (8, 8)) / 3, jax.random.normal(other, (4, 8))
    low = autocast(block, policy=BF16.with_level(level))
    expected = jax.grad(lambda w: jnp.sum(block(w, x)))(w)
    found = jax.grad(lambda w: jnp.sum(low(w, x)))(w)
    assert found.dtype == jnp.float32
    assert jnp.linalg.norm(found - expected) < 2e-2 * jnp.linalg.norm(expected)


def test_full_size_inputs_of_level_compute_are_cast_once():
    fn = autocast(lambda w, x: (x @ w + x) * x, policy=BF16.with_level("compute"), params=0)
    assert len(casts(trace(fn, W, X), "float32", "bfloat16")) == 2


def normalized(x):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True))


RESIDUAL_SUMS = {"tensor_cores": "float32", "o1": "float32", "compute": "bfloat16"}


@pytest.mark.parametrize(("level", "dtype"), RESIDUAL_SUMS.items(), ids=RESIDUAL_SUMS)
def test_residual_stream_before_norms(level, dtype):
    """Every reader of the sums is float32, or another sum: o1 raises them, "compute" does not."""

    def network(w, x):
        for _ in range(2):
            x = x + jnp.tanh(normalized(x) @ w) @ w
        return normalized(x)

    jaxpr = trace(autocast(network, policy=BF16.with_level(level)), W, X)
    sums = [e.outvars[0].aval for e in find(jaxpr, "add") if e.outvars[0].aval.shape == X.shape]
    assert [aval.dtype.name for aval in sums] == [dtype] * 2


@pytest.mark.parametrize(("level", "dtype"), RESIDUAL_SUMS.items(), ids=RESIDUAL_SUMS)
def test_residual_stream_that_starts_with_positions(level, dtype):
    """A vision transformer adds positions to what a class token joins: the stream starts there."""

    def network(params, x):
        x = jnp.concatenate([params["token"], x @ params["patch"]]) + params["positions"]
        for _ in range(2):
            x = x + jnp.tanh(normalized(x) @ params["w"]) @ params["w"]
        return normalized(x)

    params = {"token": X[:1], "patch": W, "positions": np.ones((X.shape[0] + 1, 8)), "w": W}
    params["positions"] = params["positions"].astype(np.float32)
    jaxpr = trace(autocast(network, policy=BF16.with_level(level)), params, X)
    shape = params["positions"].shape
    sums = [e.outvars[0].aval for e in find(jaxpr, "add") if e.outvars[0].aval.shape == shape]
    assert [aval.dtype.name for aval in sums] == [dtype] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_scale_and_mask_before_softmax_are_float32(level):
    def attention(w, x):
        scores = x @ w / 8 + jnp.where(x > 0, 0.0, -1e9)
        return jax.nn.softmax(scores) @ w

    jaxpr = trace(autocast(attention, policy=BF16.with_level(level)), W, X)
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

        (product,) = find(trace(autocast(fn, compute_dtype=jnp.bfloat16), W, X), "mul")
        return product.outvars[0].aval.dtype

    assert dtype_of_product(lambda product, state: state + product) == jnp.bfloat16
    assert dtype_of_product(lambda product, state: state - product) == jnp.float32
    assert dtype_of_product(lambda product, state: jnp.sum(product)) == jnp.float32
    assert dtype_of_product(lambda product, state: jnp.exp(product) + product) == jnp.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BF16.with_level("O1"), "level must be one of 'tensor_cores', 'o1', 'compute'"),
        (lambda: Policy(jnp.bfloat16, dot_output="comput"), "Did you mean 'compute'"),
        (lambda: autocast(block, policy="compute=bfloat16,level=02"), "level must be one of"),
        (lambda: autocast(block, policy="compute=bfloat16,lvel=o1"), "Did you mean 'level'"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_activation_is_narrowed_once_and_early():
    """exp -> reshape -> two dots: one cast, of the smaller count of values, before they part."""

    def fn(w, x):
        y = jnp.exp(x)
        return y.reshape(2, 16).reshape(4, 8) @ w, y.T @ y

    jaxpr = trace(autocast(fn, compute_dtype=jnp.bfloat16, params=0), W, X)
    (exp,) = find(jaxpr, "exp")
    down = [e for e in casts(jaxpr, "float32", "bfloat16") if e.invars[0] is exp.outvars[0]]
    assert len(down) == 1
    assert len(casts(jaxpr, "float32", "bfloat16")) == 2  # and the weight


def test_a_literal_that_does_not_fit_is_not_narrowed():
    fn = autocast(lambda w, x: jnp.maximum(jnp.exp(x), 1e-8) @ w, params=0)
    (maximum,) = find(trace(fn, W, X), "max")
    assert maximum.outvars[0].aval.dtype == jnp.float32
