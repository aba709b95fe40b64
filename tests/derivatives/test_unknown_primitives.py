"""`on_unknown` sees primitives in derivative rules, which exist only when JAX differentiates."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from jmp_autocast import autocast, explain

unknown = Primitive("unknown_in_a_rule")
unknown.def_impl(lambda x: 2 * x)
unknown.def_abstract_eval(lambda x: x)
jax.interpreters.mlir.register_lowering(
    unknown, jax.interpreters.mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
)

X = np.float32([1, 2])


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (unknown.bind(ct) * jnp.cos(x),))


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), unknown.bind(*tangents)))


@pytest.mark.parametrize("function", [with_vjp], ids=["custom_vjp"])
def test_an_unknown_primitive_in_a_derivative_rule(function):
    loss = lambda x: jnp.sum(function(x))
    autocast(loss, on_unknown="error")(X)  # the rule does not run
    with pytest.raises(ValueError, match="unknown_in_a_rule"):
        jax.grad(autocast(loss, on_unknown="error"))(X)
    with pytest.warns(UserWarning, match="unknown_in_a_rule"):
        jax.grad(autocast(loss, on_unknown="warn"))(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(autocast(loss))(X)


def test_an_unknown_primitive_in_a_jvp_rule():
    with pytest.raises(ValueError, match="unknown_in_a_rule"):
        jax.jvp(autocast(lambda x: jnp.sum(with_jvp(x)), on_unknown="error"), (X,), (X,))


def test_what_is_unknown_does_not_depend_on_what_was_planned_before():
    def fn(x):
        return jax.jit(lambda x: jnp.sin(x))(x), jax.jit(lambda x: unknown.bind(x))(x)

    assert explain(fn, X).totals.unknown == ("unknown_in_a_rule",)
