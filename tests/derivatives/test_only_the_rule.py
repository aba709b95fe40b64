"""Functions in which nothing is lowered, and whose derivative rules have products: they are."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jmp_autocast import BF16, autocast, full_precision
from tests.support.jaxprs import DOTS, equations, trace

X = jax.random.normal(jax.random.key(0), (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 8)) / 4


def backward(saved, g):
    x, w = saved
    return g @ w.T, x.T @ g


def in_8_bits(x):
    return jnp.round(x * 10).astype(jnp.int8)


@jax.custom_vjp
def quantized(x, w):
    """A product of integers, whose gradient passes straight through, as in training for int8."""
    product = jnp.matmul(in_8_bits(x), in_8_bits(w), preferred_element_type=jnp.int32)
    return product.astype(jnp.float32) / 100


quantized.defvjp(lambda x, w: (quantized(x, w), (x, w)), backward)


def product_kernel(x, w, out):
    out[...] = jnp.dot(x[...], w[...])


@jax.custom_vjp
def kernel(x, w):
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return pl.pallas_call(product_kernel, out_shape=shape, interpret=True)(x, w)


kernel.defvjp(lambda x, w: (kernel(x, w), (x, w)), backward)


@jax.custom_jvp
def looked_up(x, w):
    return jnp.sort(x[:, :8] + w[0])


@looked_up.defjvp
def _looked_up_jvp(primals, tangents):
    x, w = primals
    return looked_up(x, w), tangents[0] @ w + x @ tangents[1]


FUNCTIONS = {"quantized": quantized, "kernel": kernel, "looked_up": looked_up}
EACH = pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
AROUND = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "after a product": lambda f: lambda x, w: f(jnp.tanh(x @ w @ w.T), w),
}


def loss_of(fn, around):
    return lambda x, w: jnp.sum(around(fn)(x, w) ** 2)


def float_products(jaxpr):
    """The products of floats, but for those inside a kernel."""
    every = equations(jaxpr, whole=["accumulate", "pallas_call"])
    products = [e for e in every if e.primitive.name in ("accumulate", *DOTS)]
    return [e for e in products if e.invars[0].aval.dtype != jnp.int8]


CASES = {
    f"{name} {how}": (fn, around)
    for name, fn in FUNCTIONS.items()
    for how, around in AROUND.items()
    if name != "kernel" or how == "alone"  # its rule is that of the other custom_vjp
}


@pytest.mark.parametrize(("fn", "around"), CASES.values(), ids=CASES)
def test_products_of_the_rule_are_lowered(fn, around):
    loss = loss_of(fn, around)
    gradient = jax.grad(autocast(loss, policy=BF16), (0, 1))
    jaxpr = trace(gradient, X, W).jaxpr
    dtypes = {v.aval.dtype for e in float_products(jaxpr) for v in e.invars[:2]}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}
    found = jax.jit(gradient)(X, W)
    assert {g.dtype for g in found} == {jnp.dtype(jnp.float32)}
    if around is not AROUND["after a product"]:  # int8 and a sort have steps
        chex.assert_trees_all_close(
            found, jax.jit(jax.grad(loss, (0, 1)))(X, W), rtol=2e-2, atol=5e-2
        )


@EACH
def test_and_the_values_are_the_same(fn):
    chex.assert_trees_all_equal(jax.jit(autocast(fn, policy=BF16))(X, W), jax.jit(fn)(X, W))


@EACH
def test_a_rule_in_full_precision_stays_as_it_is(fn):
    def loss(x, w):
        with full_precision():
            return jnp.sum(fn(x, w) ** 2)

    gradient = jax.grad(autocast(loss, policy=BF16), (0, 1))
    dtypes = {v.aval.dtype for e in float_products(trace(gradient, X, W).jaxpr) for v in e.invars}
    assert dtypes == {jnp.dtype(jnp.float32)}
    chex.assert_trees_all_equal(jax.jit(gradient)(X, W), jax.jit(jax.grad(loss, (0, 1)))(X, W))


def test_linear_algebra_of_jax_keeps_its_rule():
    loss = lambda x: jnp.sum(jnp.linalg.slogdet(x)[1])
    gradient = jax.grad(autocast(loss, policy=BF16))
    x = X[:, :8] + 3 * jnp.eye(8)
    chex.assert_trees_all_equal(jax.jit(gradient)(x), jax.jit(jax.grad(loss))(x))
