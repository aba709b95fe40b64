"""Gradients of a scaled loss: the forms of jax.value_and_grad, any dtype of the loss."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import autocast, dynamic_loss_scaling, scaled_value_and_grad
from tests.support.loss_scale_runs import dynamic

SCALE = 1024.0
A, B = np.array([1.0, 2.0], np.float32), np.array([3.0, -1.0], np.float32)


def product(a, b, *, power=1):
    return jnp.sum(a * b["b"] ** power) + 2.0 * jnp.sum(a)


def with_aux(a, b, **kwargs):
    return product(a, b, **kwargs), {"a": a, "n": jnp.int32(3), "half": a.astype(jnp.float16)}


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def same(a, b):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, actual, expected)


def times(tree, factor):
    return jax.tree.map(lambda leaf: leaf * np.asarray(factor, leaf.dtype), tree)


FORMS = [
    (0, False, {}),
    (1, True, {"power": 2}),
    (-1, False, {}),
    ((0,), True, {}),
    ((1, 0), False, {"power": 2}),
    ([0, 1], True, {}),
]


@pytest.mark.parametrize(("argnums", "has_aux", "kwargs"), FORMS, ids=str)
def test_the_forms_of_value_and_grad(argnums, has_aux, kwargs):
    fn = with_aux if has_aux else product

    @jax.jit
    def everything(scale, a, b):
        return (
            jax.value_and_grad(fn, argnums, has_aux)(a, b, **kwargs),
            scaled_value_and_grad(fn, argnums, has_aux)(scale, a, b, **kwargs),
        )

    (value, grads), scaled = everything(SCALE, A, {"b": B})
    assert_same(scaled, (value, times(grads, SCALE)))


@pytest.mark.parametrize("form", ["python", "numpy", "jax", "opt_state", "scale_state"])
def test_the_forms_of_a_scale(form):
    scale = {
        "python": 8,
        "numpy": np.float64(8),
        "jax": jnp.bfloat16(8),
        "opt_state": dynamic_loss_scaling(optax.sgd(1.0), init_scale=8.0).init(A),
        "scale_state": dynamic(8.0),
    }[form]
    value, grads = scaled_value_and_grad(jnp.sum)(scale, A)
    assert_same((value, grads), (np.float32(3), np.full(2, 8, np.float32)))


def test_the_signature_says_where_the_scale_goes():
    """jax.jit looks up static_argnames in it."""

    def loss(scale, cubed, w):
        return scale * (w**3 if cubed else w)

    wrapped = scaled_value_and_grad(loss, argnums=2)
    assert list(inspect.signature(wrapped).parameters) == ["scale_", "scale", "cubed", "w"]
    assert wrapped.__name__ == "loss"
    jitted = jax.jit(wrapped, static_argnames="cubed")
    assert float(jitted(4.0, np.float32(1), True, np.float32(2))[1]) == 4.0 * 12.0
    partial = scaled_value_and_grad(functools.partial(loss, 3.0, False))
    assert float(partial(4.0, np.float32(2))[1]) == 12.0
    assert float(scaled_value_and_grad(jnp.sum)(4.0, np.float32(2))[1]) == 4.0


NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("scale", [2.0**16, 2.0**24, 45875.3, 1.0, 2.0**-20, 2.0**-100], ids=str)
@pytest.mark.parametrize("dtype", [*NARROW, "float32"])
def test_a_narrow_loss_and_any_scale(dtype, scale):
    """Neither the product with the scale overflows nor its cotangent, and neither vanishes."""

    def loss(w):
        return jnp.sum(w * w).astype(dtype)

    w = np.array([0.5, 1.25, -3.0], np.float32)
    value, grads = jax.jit(scaled_value_and_grad(loss))(np.float32(scale), w)
    assert value.dtype == jnp.dtype(dtype)
    assert np.asarray(value) == np.sum(w * w).astype(jnp.dtype(dtype))
    assert grads.dtype == jnp.float32
    np.testing.assert_allclose(grads, 2 * w * np.float32(scale), rtol=3e-7)


def test_a_float64_loss():
    with jax.enable_x64(True):
        w = np.array([0.5, 1e-30], np.float64)
        value, grads = scaled_value_and_grad(lambda w: jnp.sum(w**2))(2.0**24, w)
        assert value.dtype == grads.dtype == np.float64
        np.testing.assert_allclose(grads, 2 * w * 2.0**24, rtol=1e-15)
        narrow = scaled_value_and_grad(lambda w: jnp.sum(w**2).astype(jnp.float16))(2.0**24, w)[1]
        np.testing.assert_allclose(narrow, 2 * w * 2.0**24, rtol=1e-15)


@pytest.mark.parametrize(
    ("scale", "x"),
    [(2.0**14, [1.5, 0.25]), (2.0**33, [3 * 2.0**-24, 2.0**-23])],
    ids=["the_scale_is_the_cotangent", "what_is_missing_exceeds_float16"],
)
@pytest.mark.parametrize("dtype", ["complex64", "float16", "bfloat16"])
def test_a_narrow_loss_of_leaves_of_other_dtypes(dtype, scale, x):
    x = np.array(x).astype(jnp.dtype(dtype))

    def loss(x):
        return jnp.sum(x * jnp.conj(x)).real.astype(jnp.float16)

    _, grads = scaled_value_and_grad(loss)(scale, x)
    assert grads.dtype == x.dtype
    expected = 2 * scale * x.astype(np.complex64)
    np.testing.assert_array_equal(grads.astype(np.complex64), expected)


def test_vmap_over_examples_and_over_scales():
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    fn = scaled_value_and_grad(lambda w: jnp.sum(w**2))
    value, grads = jax.jit(jax.vmap(fn, in_axes=(None, 0)))(8.0, rows)
    assert_same((value, grads), (np.sum(rows**2, axis=1), 16 * rows))
    scales = np.array([1, 2, 2**24], np.float32)
    _, grads = jax.jit(jax.vmap(fn))(scales, rows)
    assert_same(grads, 2 * rows * scales[:, None])
    for axis_name, scales in ((None, [8, 4, 8]), ("i", [4, 4, 4])):
        tx = dynamic_loss_scaling(optax.sgd(1.0), init_scale=8.0, axis_name=axis_name)
        step = jax.vmap(tx.update, (0, None, None), axis_name="i")
        bad = rows * np.array([1, np.inf, 1], np.float32)[:, None]
        _, state = jax.jit(step)(bad, tx.init(rows[0]), rows[0])
        assert state.loss_scale.scale.tolist() == scales


def test_grad_of_grad():
    """The loss of one gradient in another, as a gradient penalty has it."""

    def outer(w, low):
        def inner(w):
            return jnp.sum(w**3).astype(jnp.float16 if low else jnp.float32)

        _, grads = scaled_value_and_grad(inner)(SCALE, w)
        return jnp.sum((grads / SCALE) ** 2)

    for low in (False, True):
        fn = jax.jit(scaled_value_and_grad(outer), static_argnames="low")
        value, grads = fn(8.0, A, low)
        np.testing.assert_allclose(value, np.sum((3 * A**2) ** 2), rtol=1e-6)
        np.testing.assert_allclose(grads, 8.0 * 36 * A**3, rtol=1e-6)


@pytest.mark.parametrize("loss_dtype", ["float32", "float16"])
def test_gradients_that_vanish_in_float16_do_not_with_a_scale(loss_dtype):
    """Below 2**-25, half of the smallest float16 above zero, a cotangent rounds to zero."""

    def loss(w, x):
        return jnp.asarray(1e-8 * jnp.sum(x @ w), loss_dtype)

    low = autocast(loss, jnp.float16)

    @jax.jit
    def both(scale, w, x):
        return jax.grad(low)(w, x), scaled_value_and_grad(low)(scale, w, x)[1]

    w, x = np.ones((8, 2), np.float32), np.ones((8, 8), np.float32)
    unscaled, grads = both(2.0**16, w, x)
    assert (np.asarray(unscaled) == 0).all()
    assert grads.dtype == jnp.float32
    np.testing.assert_allclose(grads / 2**16, np.full((8, 2), 8e-8), rtol=1e-3)
