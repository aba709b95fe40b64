"""Wrong uses of loss scaling; `tests/loss_scaling/test_arguments.py` has the numbers."""

import jax.numpy as jnp
import numpy as np
import optax

from jmp_autocast import (
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
    static_loss_scaling,
)
from jmp_autocast.loss_scaling import loss_scale

from .row import Row, X, loss, rows

NO_SCALE = r"No loss scale in this state"
INIT = r"from the init of an optimizer that contains dynamic_loss_scaling\(...\)"
RANGE = "is out of range: it must be"
ABOVE_ZERO = "a finite float32 number above 0"
INNER = r"wraps an optax gradient transformation such as optax.adam\(1e-3\)"
LOSS = r"must be a floating array of shape \(\)"
UPDATE = r"The arguments of update are \(gradients, state, params\)"
POSITION = "the position of an argument of the loss, or a sequence"


def _update(mistake, state_of, value):
    call = lambda w: w.tx.update(w.grads, state_of(w), w.params)
    rule = "must be a LossScalingState, from its init or its last update"
    return Row("dynamic_loss_scaling", mistake, call, TypeError, "state that", value, rule, UPDATE)


def _gradient(mistake, call, error, *parts):
    return Row("scaled_value_and_grad", mistake, call, error, *parts)


def _state(read, state_of, value):
    call = lambda w: read(state_of(w))
    return Row(read.__name__, f"of {value}", call, ValueError, "state", value, NO_SCALE, INIT)


ROWS = [
    *rows(
        TypeError,
        {
            "static_loss_scaling: arguments swapped": (
                lambda w: static_loss_scaling(8.0, optax.sgd(0.1)),
                "scale | GradientTransformation | must be a number | number",
            ),
            "dynamic_loss_scaling: a list of axes": (
                lambda w: dynamic_loss_scaling(optax.sgd(0.1), axis_name=["data"]),
                r"axis_name | \['data'\] | the name of a mapped axis | or a tuple of names",
            ),
        },
    ),
    *rows(
        ValueError,
        {
            "loss_scale: of two states": (
                lambda w: loss_scale([w.opt_state, w.opt_state]),
                r"state | \[0\].loss_scale, \[1\].loss_scale | 2 loss scales | "
                "Pass the part that holds the one you mean",
            ),
        },
    ),
    *(
        Row(public, f"{value}, no optimizer", call, TypeError, public, value, INNER, "optax.adam")
        for public, call, value in (
            ("dynamic_loss_scaling", lambda w: dynamic_loss_scaling(1e-3), "0.001"),
            ("static_loss_scaling", lambda w: static_loss_scaling("adam", 8.0), "'adam'"),
        )
    ),
    _update("the inner state", lambda w: w.opt_state.inner_state, "got tuple"),
    _update("no state", lambda w: None, "got NoneType"),
    _gradient(
        "a loss that was called already",
        lambda w: scaled_value_and_grad(jnp.float32(1)),
        TypeError,
        "value_and_grad | float32.* | takes a function | scaled_value_and_grad\\(loss",
    ),
    *(
        _gradient(
            f"{value}, no positions",
            lambda w, argnums=argnums: scaled_value_and_grad(loss, argnums),
            TypeError,
            "argnums",
            value,
            POSITION,
            "The scale does not count",
        )
        for argnums, value in (("params", "'params'"),)
    ),
    *(
        _gradient(
            f"a scale of {scale}",
            lambda w, scale=scale: scaled_value_and_grad(loss)(scale, w.params, X),
            ValueError,
            f"scale | ={scale} | {RANGE} | {ABOVE_ZERO}",
        )
        for scale in (0.0, -8.0, float("nan"), 0)
    ),
    *(
        _gradient(
            f"a scale that is {what}",
            lambda w, scale=scale: scaled_value_and_grad(loss)(scale, w.params, X),
            ValueError,
            "scale",
            value,
            r"must be a number, an array of shape \(\)",
            "or an optimizer state",
        )
        for what, scale, value in (
            ("a vector", np.ones(2, np.float32), r"shape \(2,\)"),
            ("a bool", True, "dtype bool"),
            ("complex", 2j, "dtype complex"),
        )
    ),
    *(
        _gradient(
            f"a loss that returns {what}",
            lambda w, fn=fn: scaled_value_and_grad(fn)(8.0, w.params),
            TypeError,
            "The loss that <lambda> returns",
            value,
            LOSS,
            "return a pair and pass has_aux=True",
        )
        for what, fn, value in (
            ("a vector", lambda p: p["w"][0], r"shape \(2,\)"),
            ("an int", lambda p: jnp.int32(1), "dtype int32"),
            ("nothing", lambda p: None, "NoneType"),
            ("a generator", lambda p: (yield p), "is a generator"),
        )
    ),
    *(
        _gradient(
            f"auxiliary data, but {what}",
            lambda w, fn=fn: scaled_value_and_grad(fn, has_aux=True)(8.0, w.params),
            TypeError,
            "has_aux=True",
            value,
            "must return a pair",
            "of the loss and auxiliary data",
        )
        for what, fn, value in (
            ("none", lambda p: p["w"][0, 0], "returns an array"),
            ("two of them", lambda p: (p["w"][0, 0], 1, 2), "returns a tuple"),
        )
    ),
    _state(loss_scale, lambda w: w.params, "a dict"),
    _state(skipped_steps, lambda w: w.tx, "a GradientTransformation"),
]
