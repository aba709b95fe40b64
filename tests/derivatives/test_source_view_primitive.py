"""`source_view` by itself: its value is its second operand, its derivative that of the first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, autocast
from jmp_autocast.interpreters.compat import Literal, body_of
from jmp_autocast.interpreters.primitives.source_view import source_view
from tests.support.jaxprs import dtypes, find, trace

# The operands differ, so that it shows which of them is read.
FULL, LOW = np.float32([1, 2, 3]), jnp.array([4, 5, 6], jnp.bfloat16)


def test_the_value_is_the_low_copy_and_the_derivative_that_of_the_leaf():
    out, tangent = jax.jvp(source_view, (FULL, LOW), (2 * FULL, 10 * LOW))
    assert out.dtype == tangent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, LOW)
    np.testing.assert_array_equal(tangent, 2 * FULL)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 1), (0, None), (None, 0), (None, 1), (2, 1)])
def test_its_batching(axes):
    def batched(x, axis):
        """Three different copies along ``axis`` of a (3, 2) array."""
        x = x.reshape(3, 1) * np.ones((1, 2), x.dtype)
        return x if axis is None else jnp.stack([x, 2 * x, 3 * x], axis)

    full, low = batched(FULL, axes[0]), batched(LOW, axes[1])
    expected = batched(LOW, None if axes[1] is None else 0)
    out = jax.vmap(source_view, axes)(full, low)
    np.testing.assert_array_equal(out, jnp.broadcast_to(expected, (3, 3, 2)))
    loss = lambda full, low: jnp.sum((source_view(full, low) * low).astype(jnp.float32))
    grads = jax.vmap(jax.grad(loss), axes)(full, low)
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, jnp.broadcast_to(expected, (3, 3, 2)))


def test_it_lowers_to_nothing():
    text = jax.jit(source_view).lower(FULL, LOW).as_text()
    assert "bf16" in text
    assert "stablehlo." not in text


def bound_anew(closed):
    """The function of a jaxpr, by an interpreter that hands no name stack on, as many do."""

    def function(*args):
        values = dict(zip(body_of(closed).invars, args, strict=True))
        for eqn in body_of(closed).eqns:
            operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            out = eqn.primitive.bind(*operands, **eqn.params)
            values.update(
                zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
            )
        return [values[v] for v in body_of(closed).outvars]

    return function


def test_equations_of_an_inner_autocast_stay_without_their_scope():
    """The scope says that an autocast has dealt with them; their primitives say so as well."""
    x = np.random.default_rng(0).standard_normal((8, 8), np.float32)
    half = functools.partial(autocast, policy=BF16, params=0)
    inner = half(lambda w, x: jnp.tanh(jnp.tanh(x @ w) * w[0]) @ w)
    once = trace(inner, x, x)
    outer = half(bound_anew(once))
    again = trace(outer, x, x)
    for name in ("accumulate", "source_view"):
        found, expected = (
            {(dtypes(eqn.invars), dtypes(eqn.outvars)) for eqn in find(jaxpr, name)}
            for jaxpr in (again, once)
        )
        assert found == expected != set()
    gradients = [
        jax.grad(lambda w, f=f: jnp.sum(f(w, x)))(x) for f in (inner, lambda *a: outer(*a)[0])
    ]
    np.testing.assert_array_equal(*gradients)
