"""Wrong uses of `jmp_autocast.integrations.nnx.autocast`."""

import jax.numpy as jnp

from jmp_autocast.integrations.nnx import autocast

from .row import Row, X, loss, rows

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
    *rows(
        TypeError,
        {
            "integrations.nnx.autocast: a module closed over": (
                lambda w: autocast(lambda x: w.model(x))(jnp.asarray(X)),
                "<lambda> | NNX module that it closes over | changes the state | "
                "Pass the module as an argument",
            ),
            "integrations.nnx.autocast: a traced array in a static attribute": (
                lambda w: autocast(keeps_a_traced_array)(w.model, jnp.asarray(X)),
                "keeps_a_traced_array | 'kept' | leaves a traced array in the static attribute | "
                "Hold it in an nnx.Variable",
            ),
        },
    ),
    _option("out of range", ValueError, "params=2", "out of range", "takes 2 pos", params=2),
]
