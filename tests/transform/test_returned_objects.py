"""Objects that a function returns besides arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, autocast

X = jnp.eye(4)


class Model:
    def __init__(self, w):
        self.w = w @ w

    def result(self):
        return self.w


class Slotted:
    __slots__ = ("parts",)

    def __init__(self, w):
        self.parts = [{"w": w @ w}]


@dataclasses.dataclass
class Plain:
    w: object


HOLD_ARRAYS = {
    "a class": Model,
    "slots": Slotted,
    "a dataclass": lambda w: (w, Plain(w @ w)),
    "a closure": lambda w: lambda: w,
    "a partial": lambda w: functools.partial(jnp.add, w @ w),
    "a method": lambda w: Model(w).result,
}


@pytest.mark.parametrize("name", HOLD_ARRAYS)
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["called", "jit"])
def test_an_object_with_arrays_is_refused(name, run):
    with pytest.raises(TypeError, match=r"not a valid JAX type\. Return arrays in a pytree"):
        run(autocast(HOLD_ARRAYS[name], policy=BF16))(X)


def test_an_object_without_arrays_is_returned():
    word, function, settings = autocast(lambda w: ("a word", jnp.sin, Plain(3)), policy=BF16)(X)
    assert (word, function, settings) == ("a word", jnp.sin, Plain(3))
