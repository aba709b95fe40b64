"""The loop over equations that all interpreters share."""

import weakref

import jax
import jax.numpy as jnp

from jmp_autocast.interpreters.primitives.evaluate import evaluate


class Array:
    """Stands for an array that one knows to be alive."""


def test_a_value_is_dropped_after_its_last_use():
    def fn(x):
        first = jnp.sin(x)
        for _ in range(50):
            x = jnp.cos(x) + first
        return first, x

    jaxpr = jax.make_jaxpr(fn)(1.0)
    alive, most = weakref.WeakSet(), 0

    def step(i, eqn, operands):
        nonlocal most
        most = max(most, len(alive))
        made = Array()
        alive.add(made)
        return [made]

    outputs = evaluate(jaxpr, [], [Array()], lambda literal: literal, step)
    # `first`, the operand and what the equation before made; 101 while all were kept.
    assert most <= 3
    assert set(outputs) == set(alive)


def test_an_argument_that_is_returned_and_read_stays():
    jaxpr = jax.make_jaxpr(lambda x, y: (x, x * x, y))(1.0, 2.0)
    step = lambda i, eqn, operands: [(eqn.primitive.name, *operands)]
    assert evaluate(jaxpr, [], ["x", "y"], lambda v: v, step) == ["x", ("mul", "x", "x"), "y"]
