"""Equations that do not change are written into the jaxpr, and are what binding gives."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from jmp_autocast import autocast
from jmp_autocast.interpreters.compat import name_stack, source_line, staging
from jmp_autocast.interpreters.compat.private_names import private
from jmp_autocast.interpreters.compat.staging import staged_as_it_is
from jmp_autocast.interpreters.rewrite import unchanged
from tests.corpus.jaxpr_text import jaxpr_text
from tests.support.jaxprs import trace

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def equation(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).eqns
    return eqn


def written(eqn, *operands):
    """Whether the equation was written, and the jaxpr."""
    seen = []

    def program(*xs):
        results = staged_as_it_is(eqn, xs)
        seen.append(results is not None)
        return results or []

    return seen, jax.make_jaxpr(program)(*operands)


def test_an_equation_is_written_as_it_is():
    eqn = equation(lambda x: jnp.sin(x), X)
    (seen,), jaxpr = written(eqn, X)
    assert seen
    assert str(jaxpr) == str(jax.make_jaxpr(jnp.sin)(X))


OTHERWISE = {
    "another dtype": (lambda x: jnp.sin(x), X.astype(np.float16)),
    "another shape": (lambda x: jnp.sin(x), X[0]),
    "a strong type": (lambda x: jnp.sin(x), np.float32(2)),
}


@pytest.mark.parametrize(("function", "operand"), OTHERWISE.values(), ids=OTHERWISE)
def test_an_operand_of_another_type_is_bound(function, operand):
    eqn = equation(function, 2.0 if operand.ndim == 0 else X)
    (seen,), jaxpr = written(eqn, operand)
    assert not seen
    assert not jaxpr.eqns


@pytest.mark.parametrize(
    "around",
    [lambda f: f(X), lambda f: jax.vmap(f)(X[None]), lambda f: jax.jvp(f, (X,), (X,))],
    ids=["no jit", "vmap", "jvp"],
)
def test_where_no_jaxpr_is_written_it_is_bound(around):
    eqn, seen = equation(lambda x: jnp.sin(x), X), []
    around(lambda x: seen.append(staged_as_it_is(eqn, [jnp.asarray(x)])) or x)
    assert seen == [None]


def test_an_effect_has_an_order():
    program = lambda x: jax.debug.print("{}", x)
    (seen,), _ = written(equation(program, X), X)
    assert not seen


def test_a_primitive_that_is_lowered_in_a_pass_of_its_own():
    """JAX 0.12 has one for it; the jaxpr did not say so, and XLA does not know it."""
    fn = autocast(lambda x: jnp.nonzero(x, size=2)[0])
    np.testing.assert_array_equal(jax.jit(fn)(X[1]), [0, 1])
    np.testing.assert_array_equal(jax.jit(fn)(X[0]), [1, 2])


def program(x):
    with jax.named_scope("layer"):
        y = jnp.transpose(x) * 2.0
        with set_xla_metadata(key="value"):
            y = jnp.exp(y) + jnp.sum(y)
    return jnp.where(y > 1, y, jnp.broadcast_to(y[:1], y.shape))


class Otherwise:
    """What JAX writes jaxprs with, if it has no such methods."""


# Another JAX: a name is gone, or what it stands for is another class.
ANOTHER = {
    "no current trace": {"jax._src.core.trace_ctx": None},
    "no class of traces": {"jax._src.interpreters.partial_eval.DynamicJaxprTrace": None},
    "another trace": {
        "jax._src.core.trace_ctx": SimpleNamespace(trace=Otherwise()),
        "jax._src.interpreters.partial_eval.DynamicJaxprTrace": Otherwise,
    },
}


@pytest.mark.parametrize("names", ANOTHER.values(), ids=ANOTHER)
@pytest.mark.parametrize("inside", [lambda f: f, lambda f: lambda x: jnp.cos(f(x @ x.T))])
def test_it_is_what_binding_gives(monkeypatch, inside, names):
    seen = []

    def staged(eqn, operands):
        results = staged_as_it_is(eqn, operands)
        seen.append(results is not None)
        return results

    def described():
        seen.clear()
        jaxpr = trace(autocast(inside(program)), X)
        return jaxpr_text(jaxpr), [(name_stack(e), source_line(e)) for e in jaxpr.jaxpr.eqns]

    monkeypatch.setattr(unchanged, "staged_as_it_is", staged)
    found = described()
    assert sum(seen) >= 5
    assert "xla_metadata" in found[0]
    assert any("layer" in name for name, _ in found[1])
    monkeypatch.setattr(staging, "private", lambda name: names.get(name, private(name)))
    assert described() == found
    assert not any(seen)


def test_most_equations_are_written(monkeypatch):
    """Binding them took three times as long."""
    seen = []

    def staged(eqn, operands):
        results = staged_as_it_is(eqn, operands)
        seen.append(results is not None)
        return results

    monkeypatch.setattr(unchanged, "staged_as_it_is", staged)
    jaxpr = trace(autocast(program), X)
    assert sum(seen) >= len(jaxpr.jaxpr.eqns) - 1
