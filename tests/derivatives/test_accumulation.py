"""Contractions that hand out their float32 accumulator: values, dtypes and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast.interpreters.compat import jaxpr_as_fun
from jmp_autocast.interpreters.primitives.accumulate import accumulating_contraction
from tests.support.contractions import (
    FLOAT32,
    TABLE,
    TRANSFORMS,
    accumulating,
    arguments,
    quadratic,
)
from tests.support.jaxprs import assert_dots_run_in, find, trace
from tests.support.numerics import relative_error

DTYPES = ["bfloat16", "float16"]
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half a unit in the last place
NAME = "accumulate"


# --- values and dtypes -----------------------------------------------------------------------


def with_gradients(f):
    def run(x, w, cotangent):
        y, transpose = jax.vjp(f, x, w)
        return y, *transpose(cotangent)

    return run


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_values_and_gradients_against_float64(row):
    plain = row[2]
    x, w = arguments(row, jnp.bfloat16)
    shape = jax.eval_shape(plain, x, w).shape
    (cotangent,) = arguments((shape,), jnp.bfloat16, seed=1)
    args = x, w, cotangent
    assert all(np.array_equal(a, a.astype(d)) for a in args for d in DTYPES)
    found = {}
    for dtype in DTYPES:
        jaxpr = trace(with_gradients(accumulating(plain, dtype)), *args)
        assert [v.aval.dtype for v in jaxpr.jaxpr.outvars] == [FLOAT32] * 3
        assert_dots_run_in(dtype, jaxpr)
        found[dtype] = jaxpr_as_fun(jaxpr)
    found = jax.jit(lambda *args: {dtype: run(*args) for dtype, run in found.items()})(*args)
    with jax.enable_x64(True):
        expected = jax.jit(with_gradients(plain))(*(a.astype(np.float64) for a in args))
    assert {a.dtype.name for a in expected} == {"float64"}
    for dtype, (y, dx, dw) in found.items():
        assert relative_error(y, expected[0]) < 1e-6
        assert relative_error(dx, expected[1]) < EPS[dtype]
        assert relative_error(dw, expected[2]) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_leaf_the_gradient_is_rounded(dtype):
    row = TABLE["dense"]
    args = arguments(row, jnp.dtype(dtype))
    gradient = lambda f: jax.jit(jax.grad(lambda w: jnp.sum(f(args[0], w))))(args[1])
    expected = gradient(row[2])
    assert relative_error(gradient(accumulating(row[2], dtype)), expected) < 1e-6
    assert relative_error(gradient(accumulating(row[2], dtype, leaf=False)), expected) > 1e-5


def test_nothing_asked_for_is_a_plain_contraction():
    row = TABLE["dense"]
    x, w = arguments(row)
    # A bfloat16 matmul is the primitive in any case, which CPUs need.
    fn = functools.partial(accumulating, row[2], "float16", out=jnp.float16)
    # A leaf without a tracer has no gradient.
    for jaxpr in (trace(fn(leaf=False), x, w), trace(lambda x: fn(leaf=True)(x, w), x)):
        assert not find(jaxpr, NAME)
        assert len(find(jaxpr, "dot_general")) == 1


# --- transforms ------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("name", ["dense", "depthwise"])
def test_transforms(name, transform):
    row = TABLE[name]
    args = arguments(row)
    jaxpr = trace(transform(quadratic(accumulating(row[2], "bfloat16"))), *args)
    assert_dots_run_in("bfloat16", jaxpr)
    found = jax.jit(jaxpr_as_fun(jaxpr))(*args)
    expected = jax.tree.leaves(jax.jit(transform(quadratic(row[2])))(*args))
    assert any(np.any(e) for e in expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axes", [(1, 0), (1, None), (None, 1)], ids=str)
def test_vmap_of_a_leaf_and_its_copy_along_different_axes(axes):
    """(leaf, copy): both have one shape, also where only one of them is batched."""
    row = TABLE["dense"]
    x, w = arguments(row)
    params = find(trace(row[2], x, w), "dot_general")[0].params
    low = x.astype(jnp.bfloat16)

    def loss(w, copy):
        full = None, w
        y = accumulating_contraction(lax.dot_general_p, params, low, copy, out=FLOAT32, full=full)
        return jnp.sum(y * y)

    copies, batch = np.stack([w, 1 - w]), [w if a is None else np.stack([w] * 2, a) for a in axes]
    if axes[1] is not None:
        batch[1] = np.moveaxis(copies, 0, axes[1])
    copy = batch[1].astype(jnp.bfloat16)
    found = jax.grad(lambda w: jnp.sum(jax.vmap(loss, axes)(w, copy)))(batch[0])
    # The value is that of the copy, the derivative is with respect to the leaf.
    gradient = jax.grad(lambda w: jnp.sum(jnp.square(row[2](x, w))))
    each = np.stack([gradient(c) for c in (copies if axes[1] is not None else [w, w])])
    expected = each.sum(0) if axes[0] is None else np.moveaxis(each, 0, axes[0])
    np.testing.assert_array_equal(found, expected)


# One large term and 512 small ones, each exact in the dtype, that sum to 2. A small one is half a
# unit in the last place of the large one: added to it one by one in 16 bits, they all vanish.
TERMS = {"bfloat16": (1.0, 2.0**-9), "float16": (1.75, 2.0**-11)}


def dot_with(w, dtype):
    """``x -> x @ w`` for a leaf that is cast once, here."""
    (eqn,) = find(trace(jnp.dot, np.ones((1, 1), np.float32), w), "dot_general")
    low = w.astype(dtype)
    return lambda x: accumulating_contraction(
        eqn.primitive, eqn.params, x.astype(dtype), low, out=FLOAT32, full=(None, w)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_second_derivatives_of_several_uses_are_added_in_float32(dtype):
    large, small = TERMS[dtype]

    def loss(w):
        dot = dot_with(w.reshape(1, 1), dtype)
        return sum(jnp.sum(dot(dot(np.full((1, 1), x, np.float32)))) for x in (small, small, large))

    jaxpr = trace(jax.grad(jax.grad(loss)), np.float32(1))
    assert_dots_run_in(dtype, jaxpr)
    assert {e.outvars[0].aval.dtype.name for e in find(jaxpr, "add_any")} == {"float32"}
    found = jax.jit(jaxpr_as_fun(jaxpr))(np.float32(1))[0]
    np.testing.assert_array_equal(found, 2 * (large + 2 * small))
