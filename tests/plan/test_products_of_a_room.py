"""The hooks by which a room plans products of its own: an invented room multiplies by 2 * w."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast
from jmp_autocast.interpreters.plan import products
from jmp_autocast.interpreters.plan.data import Emit
from tests.support.jaxprs import find, trace

X, W = jnp.full((2, 4), 0.5), jnp.arange(16.0).reshape(4, 4)
NUMBERS = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Tag:
    in_slices = False

    def moved(self, is_whole):
        return self if is_whole else None

    def sliced(self):
        return None

    def gives(self, key):
        return False


@dataclasses.dataclass(frozen=True)
class Doubled:
    when_moved = "moves"

    def copies(self, x, known, tag):
        assert tag == Tag()
        return {self: lax.mul(x, 2.0).astype(jnp.bfloat16)}

    def enters(self, tag, runs_again):
        return False


class Room:
    tag = Tag()

    def look_at(self, jaxpr):
        self.seen = jaxpr

    def in_scope(self, name):
        return self.planned

    def planned(self, at, plan, of_sources):
        if [state.tag for state in at.given] != [None, Tag()]:
            return plan
        halved = lambda x, w, doubled: lax.dot_general(x, doubled, NUMBERS) / 2
        action = Emit(halved, "halved", copies=((1, Doubled()),), as_they_are=(1,))
        return dataclasses.replace(plan, action=action)


@pytest.fixture
def room(monkeypatch):
    monkeypatch.setattr(products, "_ROOMS", [lambda policy: Room()])


def layers(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w.T), None), x, None, length=3)[0] @ w


def cast():
    return autocast(lambda w, x: layers(w, x), policy=BF16, params=0)


def test_the_room_multiplies_and_its_copy_is_made_once_and_moved(room):
    program = trace(cast(), W, X)
    (loop,) = find(program, "scan")
    # One for the loop and for the last product: the loop gets it, and transposes it.
    assert len(find(program, "mul")) == 1
    assert not find(loop.params["jaxpr"], "mul")
    assert [v.aval.dtype for v in loop.invars if v.aval.shape == (4, 4)] == ["float32", "bfloat16"]
    assert len(find(program, "div")) == 2


def test_the_result_is_that_of_the_policy(room):
    doubled = jax.jit(cast())(W, X)
    assert doubled.dtype == jnp.float32
    np.testing.assert_allclose(doubled, layers(W, X), rtol=0.02)


def test_without_the_room_nothing_is_doubled():
    assert not find(trace(cast(), W, X), "div")
