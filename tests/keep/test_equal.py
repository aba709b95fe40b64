"""Equal segments are one function, whose trace and derivative JAX keeps."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, autocast, keep_less
from jmp_autocast.interpreters.compat import name_stack
from tests.support.jaxprs import find, trace

from .programs import LAYERS, WEIGHTS, X

pytestmark = pytest.mark.usefixtures("jit_caches")


def layers(layer, count=LAYERS):
    """A function of unrolled layers, each in a scope of its own."""

    def f(weights, x):
        for i in range(count):
            with jax.named_scope(f"layer_{i}"):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i % LAYERS], weights))
        return x.sum()

    return f


def segments(f):
    return find(trace(keep_less(f, residuals="recompute"), WEIGHTS, X), "remat2", "checkpoint")


def jaxprs(found):
    return {id(eqn.params["jaxpr"]) for eqn in found}


def squashed(x, w):
    return x + jnp.tanh(jnp.exp(x @ w["q"]))


def rectified(x, w):
    """The function with a rule of its own is traced anew in each layer."""
    return jax.nn.relu(jnp.exp(x @ w["q"]) - 1.0)


@pytest.mark.parametrize("layer", [squashed, rectified])
@pytest.mark.parametrize("make", [lambda f: f, lambda f: autocast(f, policy=BF16)])
def test_more_layers_are_no_more_functions(layer, make):
    few, many = (segments(make(layers(layer, count))) for count in (3, 5))
    assert len(many) == len(few) + 2
    assert len(jaxprs(many)) == len(jaxprs(few)) <= 4


def moved(x, function=jnp.exp, dtype=jnp.float32, shift=0.0):
    """One line: only what is computed can tell the segments apart."""
    return jnp.sin(function(x.astype(dtype)) + shift).astype(jnp.float32)


@pytest.mark.parametrize(
    "other", [{"function": jnp.exp2}, {"dtype": jnp.bfloat16}, {"shift": -0.0}, {"shift": 1.0}]
)
def test_what_differs_is_a_function_of_its_own(other):
    def found(*options):
        def f(weights, x):
            for each in options:
                x = moved(x @ weights["q"][0], **each)
            return x.sum()

        return len(jaxprs(segments(f)))

    # The last segment has no product that reads it.
    assert (found({}, {}, {}, {}), found({}, {}, other, {})) == (2, 3)


def test_steps_keep_the_names_of_their_layers():
    """The product that reads a segment is of the next layer; the first segment has no sum in it."""

    def layer(x, w):
        with jax.named_scope("squash"):
            return x + jnp.tanh(jnp.exp(x @ w["q"]))

    found = segments(layers(layer, 5))
    tanh = [(name_stack(eqn), e) for eqn in found for e in find(eqn.params["jaxpr"], "tanh")]
    names = ["/".join(filter(None, (around, name_stack(e)))) for around, e in tanh]
    assert names == [f"layer_{i}/squash" for i in range(5)]
    assert {around for around, _ in tanh} > {f"layer_{i}" for i in range(1, 4)}
