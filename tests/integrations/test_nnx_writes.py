"""Autocast of functions of Flax NNX modules: what a call may not write, and leaves nothing in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx

from jmp_autocast.integrations.flax_compat import same_structure
from tests.support.jaxprs import assert_dots_run_in, trace
from tests.support.nnx_models import X, bf16


def counted(module, x):
    """Calls a module, and counts that in a variable of the current trace."""

    @bf16
    def call(count, module, x):
        count[...] += 1
        return module(x)

    return call(count := nnx.Variable(jnp.array(0)), module, x), count[...]


def test_a_module_that_the_function_closes_over_may_be_read_only():
    dense, norm = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    assert_dots_run_in("bfloat16", trace(bf16(lambda x: dense(x)), X))
    # As an argument too, where it belongs to an outer trace.
    assert_dots_run_in("bfloat16", trace(lambda x: bf16(dense)(x), X))
    # And beside one of this trace that is written.
    assert_dots_run_in("bfloat16", trace(lambda x: counted(dense, x), X))
    with pytest.raises(TypeError, match="closes over"):
        bf16(lambda x: norm(x))(X)
    before = nnx.graphdef(norm)
    with pytest.raises(errors.TraceContextError):
        trace(lambda x: bf16(norm)(x), X)
    with pytest.raises(errors.TraceContextError):
        trace(lambda x: bf16(functools.partial(setattr, norm, "name"))(x), X)
    assert nnx.graphdef(norm) == before
    np.testing.assert_array_equal(norm.mean[...], jnp.zeros(8))


class Plain(nnx.Module):
    """No variables: attributes only."""

    def __init__(self):
        self.array, self.text = nnx.data(jnp.zeros(2)), "before"


class Traced(nnx.Module):
    """Made in a trace, its array is a static attribute for Flax."""

    def __init__(self):
        self.array = jnp.zeros(2)


def new_variable():
    return nnx.Variable(jnp.zeros(2))


WRITES = {
    "value": (new_variable, lambda v: v.set_value(v[...] + 1)),
    "array": (Plain, lambda m: setattr(m, "array", m.array + 1)),
    "traced array": (Traced, lambda m: setattr(m, "array", m.array + 1)),
    "attribute": (Plain, lambda m: setattr(m, "text", "after")),
    "new attribute": (Plain, lambda m: setattr(m, "new", 1)),
    "new variable": (Plain, lambda m: setattr(m, "new", new_variable())),
    "new data": (Plain, lambda m: setattr(m, "new", nnx.data([m.array + 1]))),
    "no attribute": (Plain, lambda m: delattr(m, "text")),
}


@pytest.mark.parametrize(("make", "write"), WRITES.values(), ids=WRITES)
def test_of_several_objects_none_is_written_if_one_may_not_be(make, write):
    outer, want = make(), nnx.split(make())

    def fn(x):
        inner, count = make(), nnx.Variable(jnp.array(0))
        before = nnx.graphdef(inner), count.get_raw_value()

        def both(count, inner, outer):
            count[...] += 1
            write(inner)
            write(outer)

        with pytest.raises(errors.TraceContextError):
            bf16(both)(count, inner, outer)
        assert same_structure(nnx.graphdef(inner), before[0])
        assert count.get_raw_value() is before[1]
        bf16(both)(count, inner, make())
        assert count.get_raw_value() is not before[1]
        return x

    trace(fn, X)
    graphdef, state = nnx.split(outer)
    assert graphdef == want[0]
    jax.tree.map(np.testing.assert_array_equal, state, want[1])


class Graph(nnx.Module, pytree=False):
    """An object that Flax takes for no pytree."""


@pytest.mark.parametrize("cls", [Plain, Graph, lambda: nnx.Dropout(0.5)])
def test_an_array_in_a_new_attribute_is_data_after_the_call(cls):
    """Flax itself takes a traced array for a static attribute, and leaves it in the module."""

    def call(module, x):
        module.last = x @ x.T
        module.again = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        module.again.last = module.last
        return module.last

    module = cls()
    for _ in range(2):
        out = bf16(call)(module, X)
        for array in (module.last, module.again.last):
            assert isinstance(array, jax.Array)
            np.testing.assert_array_equal(array, out)
    assert {("last",), ("again", "last")} <= {
        path for path, _ in nnx.to_flat_state(nnx.state(module))
    }


def test_a_traced_array_in_a_static_attribute_is_an_error():
    def call(module, x):
        module.last = [x]

    module = Plain()
    before = nnx.graphdef(module)
    with pytest.raises(TypeError, match=r"call leaves a traced array in .* 'last'.*nnx\.data"):
        bf16(call)(module, X)
    assert nnx.graphdef(module) == before
    with pytest.raises(ValueError, match="static"):  # as Flax without a trace
        call(module, jnp.ones(2))
