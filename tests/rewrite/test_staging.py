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


@pytest.fixture
def seen(monkeypatch):
    """Whether each equation that did not change was written."""
    found = []

    def staged(eqn, operands):
        results = staged_as_it_is(eqn, operands)
        found.append(results is not None)
        return results

    monkeypatch.setattr(unchanged, "staged_as_it_is", staged)
    return found


@pytest.mark.parametrize("names", ANOTHER.values(), ids=ANOTHER)
@pytest.mark.parametrize("inside", [lambda f: f, lambda f: lambda x: jnp.cos(f(x @ x.T))])
def test_it_is_what_binding_gives(seen, monkeypatch, inside, names):
    def described():
        seen.clear()
        jaxpr = trace(autocast(inside(program)), X)
        return jaxpr_text(jaxpr), [(name_stack(e), source_line(e)) for e in jaxpr.jaxpr.eqns]

    found = described()
    assert sum(seen) >= 5
    assert "xla_metadata" in found[0]
    assert any("layer" in name for name, _ in found[1])
    monkeypatch.setattr(staging, "private", lambda name: names.get(name, private(name)))
    assert described() == found
    assert not any(seen)


def test_most_equations_are_written(seen):
    """Binding them took three times as long."""
    jaxpr = trace(autocast(program), X)
    assert sum(seen) >= len(jaxpr.jaxpr.eqns) - 1
