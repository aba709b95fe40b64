"""Loops in which a step reads what the step before it made, on products that are exact.

A loop takes ``read(made, h)``, which reads what was made and the product of this step, and
``make(h)``, which makes it of that product.
"""

import jax
import jax.numpy as jnp
from jax import lax


def scanned(read, make):
    def run(w, x):
        step = lambda made, row: (make(row @ w), read(made, row @ w))
        return lax.scan(step, make(x[0] @ w), x)[1]

    return run


def counted(read, make):
    def run(w, x):
        def step(k, carry):
            made, out = carry
            return make(x[k] @ w), out.at[k].set(read(made, x[k] @ w))

        n, out = len(x), jax.eval_shape(lambda: read(make(x[0]), x[0]))
        return lax.fori_loop(0, n, step, (make(x[0] @ w), jnp.zeros((n, *out.shape), out.dtype)))[1]

    return run


def of_the_step_before_last(read, make):
    """It goes through two carries."""

    def run(w, x):
        step = lambda made, row: ((make(row @ w), made[0]), read(made[1], row @ w))
        return lax.scan(step, (make(x[0] @ w),) * 2, x)[1]

    return run


def in_a_loop_in_a_loop(read, make):
    def run(w, x):
        row = lambda made, row: (make(row @ w), read(made, row @ w))
        rows = lambda made, rows: lax.scan(row, made, rows)
        return lax.scan(rows, make(x[0] @ w), x.reshape(4, -1, x.shape[-1]))[1]

    return run


def in_checkpoints(read, make):
    return scanned(jax.checkpoint(read), jax.jit(make))


LOOPS = [scanned, counted, of_the_step_before_last, in_a_loop_in_a_loop, in_checkpoints]
