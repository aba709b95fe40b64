"""`leaf_view` by itself: its value is its second operand, its derivative that of the first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast.interpreters.casts import leaf_view

# The operands differ, so that it shows which of them is read.
FULL, LOW = np.float32([1, 2, 3]), jnp.array([4, 5, 6], jnp.bfloat16)


def test_the_value_is_the_low_copy_and_the_derivative_that_of_the_leaf():
    out, tangent = jax.jvp(leaf_view, (FULL, LOW), (2 * FULL, 10 * LOW))
    assert out.dtype == tangent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, LOW)
    np.testing.assert_array_equal(tangent, 2 * FULL)


def test_the_low_copy_has_no_derivative():
    _, vjp = jax.vjp(leaf_view, FULL, LOW)
    of_full, of_low = vjp(LOW)
    assert of_full.dtype == jnp.float32
    np.testing.assert_array_equal(of_full, LOW)
    np.testing.assert_array_equal(of_low, 0)


def test_its_transposition():
    (cotangent,) = jax.linear_transpose(lambda full: leaf_view(full, LOW), FULL)(LOW)
    assert cotangent.dtype == jnp.float32
    np.testing.assert_array_equal(cotangent, LOW)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 1), (0, None), (None, 0), (None, 1), (2, 1)])
def test_its_batching(axes):
    def batched(x, axis):
        """Three different copies along ``axis`` of a (3, 2) array."""
        x = x.reshape(3, 1) * np.ones((1, 2), x.dtype)
        return x if axis is None else jnp.stack([x, 2 * x, 3 * x], axis)

    full, low = batched(FULL, axes[0]), batched(LOW, axes[1])
    expected = batched(LOW, None if axes[1] is None else 0)
    out = jax.vmap(leaf_view, axes)(full, low)
    np.testing.assert_array_equal(out, jnp.broadcast_to(expected, (3, 3, 2)))
    loss = lambda full, low: jnp.sum((leaf_view(full, low) * low).astype(jnp.float32))
    grads = jax.vmap(jax.grad(loss), axes)(full, low)
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, jnp.broadcast_to(expected, (3, 3, 2)))


def test_it_lowers_to_nothing():
    text = jax.jit(leaf_view).lower(FULL, LOW).as_text()
    assert "bf16" in text
    assert "stablehlo." not in text
