"""Wrong uses of `explain` and `op_stats`."""

import jax.numpy as jnp

from jmp_autocast import BF16, autocast, explain, op_stats

from .world import Row, X, loss, loss_at_call


def generator(x):
    yield x


ROWS = [
    Row(
        "explain",
        "an array for the function",
        lambda w: explain(X),
        TypeError,
        "explain",
        "of type ndarray",
        "takes a callable",
        "Pass the function itself",
    ),
    Row(
        "explain",
        "a generator function",
        lambda w: explain(generator, X),
        TypeError,
        "explain",
        "generator",
        "returns its result",
        "Apply explain to the function that it calls",
    ),
    Row(
        "explain",
        "a policy for a wrapper",
        lambda w: explain(autocast(loss_at_call), w.params, X, policy=BF16),
        ValueError,
        "policy=",
        "already wrapped",
        "with its own",
        "Leave policy out",
    ),
    Row(
        "explain",
        "a wrapper that casts nothing",
        lambda w: explain(autocast(loss_at_call, enabled=False), w.params, X),
        ValueError,
        "enabled=False",
        "loss",
        "no plan",
        "enabled=True",
    ),
    Row(
        "explain",
        "a level for a policy",
        lambda w: explain(loss, w.params, X, policy="o1"),
        ValueError,
        "compute_dtype",
        "'o1'",
        "must be a dtype",
        "'bfloat16'",
    ),
    Row(
        "explain",
        "a policy for a report",
        lambda w: explain(jnp.sin, X).diff(BF16),
        TypeError,
        r"Report\.diff",
        "of type Policy",
        "takes a Report",
        "Make one with explain",
    ),
    Row(
        "explain",
        "reports of two programs",
        lambda w: explain(jnp.sin, X).diff(explain(jnp.cos, X)),
        ValueError,
        r"Report\.diff",
        "sin and cos",
        "one program",
        "Explain the same function",
    ),
    Row(
        "op_stats",
        "an array for the function",
        lambda w: op_stats(X),
        TypeError,
        "op_stats",
        "of type ndarray",
        "takes a callable",
        "Pass the function itself",
    ),
]
