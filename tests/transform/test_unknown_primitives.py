"""Primitives without a rule keep their declared dtypes; `explain` names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jmp_autocast import BF16, CastPolicy, autocast, explain, full_precision, register_rule
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)  # not evenly spaced, as positions are

unknown = Primitive("unheard_of")
unknown.def_impl(lambda x: 2 * x)
unknown.def_abstract_eval(lambda x: x)
jax.interpreters.mlir.register_lowering(
    unknown, jax.interpreters.mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
)


def program(x):
    return unknown.bind(x @ X) @ X + unknown.bind(x)


def in_full_precision(x):
    with full_precision():
        return program(x)


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (unknown.bind(ct) * jnp.cos(x),))


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), unknown.bind(*tangents)))


def total(function):
    return lambda x: jnp.sum(function(x))


def as_it_is(f):
    return f


# A program, and what is derived of it, as rules run only when JAX differentiates.
PLACES = {
    "inline": (program, as_it_is),
    "jit": (jax.jit(program), as_it_is),
    "remat": (jax.checkpoint(program), as_it_is),
    "scan": (lambda x: lax.map(program, x[None]), as_it_is),
    "no floats": (lambda x: unknown.bind(jnp.argmax(x)), as_it_is),
    "full precision": (in_full_precision, as_it_is),
    "custom_vjp": (total(with_vjp), jax.grad),
    "custom_jvp": (total(with_jvp), lambda f: lambda x: jax.jvp(f, (x,), (x,))),
}


@pytest.mark.parametrize(("fn", "derived"), PLACES.values(), ids=PLACES)
def test_explain_names_it(fn, derived):
    assert explain(derived(fn), X).totals.unknown == (unknown.name,)


def test_it_keeps_declared_dtypes():
    fn = autocast(program, jnp.bfloat16)
    jaxpr = trace(fn, X)
    assert {(dtypes(e.invars), dtypes(e.outvars)) for e in find(jaxpr, unknown.name)} == {
        (("float32",),) * 2
    }
    assert_dots_run_in("bfloat16", jaxpr)
    np.testing.assert_allclose(fn(X), program(X), atol=0.05)


@pytest.mark.parametrize("how", ["register", "with_rules"])
def test_a_rule_makes_it_known(how):
    policy = BF16
    if how == "register":
        register_rule(unknown, CastPolicy.LOWER_PRECISION_FP)
    else:
        policy = policy.with_rules({unknown: CastPolicy.LOWER_PRECISION_FP})
    for eqn in find(trace(autocast(program, policy), X), unknown.name):
        assert dtypes(eqn.invars) == dtypes(eqn.outvars) == ("bfloat16",)
