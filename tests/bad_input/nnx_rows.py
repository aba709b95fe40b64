"""Wrong uses of `jmp_autocast.integrations.nnx.autocast`."""

import jax.numpy as jnp

from jmp_autocast.integrations.nnx import autocast

from .row import Row, X, loss
from .transform_rows import HALVES, PARAMS, generator

NNX = "integrations.nnx.autocast"


def call(model, x):
    return model(x)


def keeps_a_traced_array(model, x):
    out = model(x)
    model.kept = (x,)
    return out


def _option(mistake, error, value, rule, fix, **option):
    (name,) = option
    return Row(NNX, mistake, lambda w: autocast(loss, **option), error, name, value, rule, fix)


ROWS = [
    Row(
        NNX,
        "no function",
        lambda w: autocast(X),
        TypeError,
        "autocast | float32.*ndarray | takes a callable | Pass the function itself",
    ),
    Row(
        NNX,
        "a generator function",
        lambda w: autocast(generator),
        TypeError,
        ("autocast | generator | a function that returns its result | the function that it calls"),
    ),
    Row(
        NNX,
        "a value decorated",
        lambda w: autocast(policy="bfloat16")(3),
        TypeError,
        r"autocast | 3 of type int | takes a callable | @autocast\(policy",
    ),
    Row(
        NNX,
        "options of a decorator",
        lambda w: autocast(policy=jnp.int8),
        ValueError,
        f"compute_dtype | int8 | {HALVES} | enabled=False",
    ),
    _option("a number", TypeError, "16 of", "a compute dtype", "BF16", policy=16),
    _option("a path", TypeError, "'0/w'", PARAMS, "lambda path", params="0/w"),
    _option("out of range", ValueError, "params=2", "out of range", "takes 2 pos", params=2),
    Row(
        NNX,
        "a module by keyword",
        lambda w: autocast(call, params=0)(model=w.model, x=X),
        ValueError,
        (
            "params=0 | 0 positional arguments in this call of call | out of range | "
            "Pass the parameters by position, or give params a predicate"
        ),
    ),
    Row(
        NNX,
        "a module closed over",
        lambda w: autocast(lambda x: w.model(x))(jnp.asarray(X)),
        TypeError,
        (
            "<lambda> | NNX module that it closes over | changes the state | "
            "Pass the module as an argument"
        ),
    ),
    Row(
        NNX,
        "a traced array in a static attribute",
        lambda w: autocast(keeps_a_traced_array)(w.model, jnp.asarray(X)),
        TypeError,
        (
            "keeps_a_traced_array | 'kept' | leaves a traced array in the static attribute | "
            "Hold it in an nnx.Variable"
        ),
    ),
]
