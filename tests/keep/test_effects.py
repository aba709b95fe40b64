"""Effects are in one order, through calls, loops and branches, whatever is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from tests.fuzz.effects import WRAPPERS

ORDER: list[str] = []


def says(name, x):
    io_callback(lambda x: ORDER.append(name), None, x, ordered=True)


@jax.jit
def tripled(ref):
    ref[...] = 3 * jnp.sin(ref[...])


@jax.jit
def read_again(ref):
    tripled(ref)
    return jnp.cos(ref[...]) * ref[...]


def nested(x):
    ref = jax.new_ref(x)
    tripled(ref)
    first = read_again(ref)
    jax.jit(lambda r: tripled(r))(ref)
    return first + ref[...]


def overwritten(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jnp.exp(jnp.sin(x))
    first = jax.jit(lambda r: r[...] * 2)(ref)
    ref[...] = jnp.tanh(x)
    return first * ref[...]


def frozen(x):
    ref = jax.new_ref(x)
    tripled(ref)
    return jax.freeze(ref) * jnp.sin(x)


def in_branches(x):
    ref = jax.new_ref(x)
    lax.cond(x > 0, tripled, lambda r: None, ref)
    return ref[...] * jnp.tanh(ref[...])


def looped(x):
    return lax.scan(lambda c, _: (jnp.tanh(nested(c)), None), x, None, length=3)[0]


def spoken(x):
    @jax.jit
    def first(x):
        says("first", jnp.sin(jnp.sin(x) * x))

    first(x)
    says("second", x)
    jax.jit(lambda x: says("third", jnp.cos(x)))(x)
    return x * jnp.sin(x)


def spoken_in_a_loop(x):
    return lax.scan(lambda c, _: (spoken(c), None), x, None, length=2)[0]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("fn", [nested, overwritten, frozen, in_branches, looped])
def test_writes_and_reads_keep_their_order(fn, wrap):
    for transform in (lambda f: f, jax.jit):
        for part in (lambda f: f, jax.grad):
            found, expected = (transform(part(f))(2.0) for f in (wrap(fn), fn))
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("fn", [spoken, spoken_in_a_loop])
def test_ordered_callbacks_come_in_the_order_of_the_program(fn, wrap):
    found = []
    for f in (wrap(fn), fn):
        ORDER.clear()
        jax.jit(f)(2.0).block_until_ready()
        jax.effects_barrier()
        found.append(list(ORDER))
    assert found[0] == found[1]
