"""Small programs that overflow a float16 where they square."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jmp_autocast import FP16, tune

X = jnp.full((8, 8), 0.9)
EYE = jnp.eye(8)


def tuned(fn, batches, policy=FP16, **options):
    return tune(fn, batches=batches, policy=policy, **options)


def pins(report):
    return [(each.scope, each.primitive) for each in report.kept]


def big_square(x, big=300.0):
    # XLA would make an absolute value of the root of a square.
    return (jnp.sqrt(jnp.maximum(jnp.square((x @ EYE) * big), 1.0)) / big) @ EYE


def in_scope(name, fn, *args):
    with jax.named_scope(name):
        return fn(*args)


def in_scan(x):
    def body(h, _):
        with jax.named_scope("step"):
            return big_square(h), None

    with jax.named_scope("loop"):
        return lax.scan(body, x, None, length=3)[0] @ EYE


def in_cond(x):
    def branch(h):
        return in_scope("branch", big_square, h)

    return lax.cond(x[0, 0] > 0, branch, lambda h: h @ EYE, x) @ EYE


def with_odd_names(x):
    return in_scope("a[0]*", big_square, in_scope("a0", functools.partial(big_square, big=1.0), x))
