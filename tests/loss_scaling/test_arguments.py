"""Bad arguments fail where they are written, and say what is allowed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import dynamic_loss_scaling, static_loss_scaling
from tests.support.loss_scale_runs import dynamic

RANGE = "{}={} is out of range: it must be {}."
ABOVE_ZERO = "a finite float32 number above 0"
WITHIN = "within [min_scale, max_scale] = [1, 1.67772e+07]"

OUT_OF_RANGE = [
    ({"init_scale": 0.5}, WITHIN),
    ({"init_scale": 2.0**25}, WITHIN),
    ({"init_scale": float("inf")}, WITHIN),
    ({"growth_factor": 1.0}, "a finite number above 1"),
    ({"growth_factor": 1 + 1e-12}, "a finite number above 1"),  # 1 in float32
    ({"growth_factor": float("inf")}, "a finite number above 1"),
    ({"backoff_factor": 1 - 1e-12}, "a number between 0 and 1"),  # 1 in float32
    ({"backoff_factor": 0.0}, "a number between 0 and 1"),
    ({"backoff_factor": 1e-50}, "a number between 0 and 1"),  # 0 in float32
    ({"growth_interval": 0}, "an integer of at least 1"),
    ({"growth_interval": 1.5}, "an integer of at least 1"),
    ({"growth_interval": 2**31}, "an integer of at least 1"),
    ({"min_scale": 0.0}, ABOVE_ZERO),
    ({"min_scale": 2.0**-140}, ABOVE_ZERO),  # subnormal: XLA may flush it to 0
    ({"max_scale": float("inf")}, "finite and at least min_scale=1"),
    ({"max_scale": 0.5}, "finite and at least min_scale=1"),
]

NO_NUMBERS = [
    ("8", "must be a number, got '8'."),
    (True, "must be a number, got True."),
    ([8.0], "must be a number, got [8.0]."),
    (np.ones(1), "must be a real number, got an array of shape (1,) and dtype float64."),
    (np.array(True), "must be a real number, got an array of shape () and dtype bool."),
]

FIELDS = [
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "min_scale",
    "max_scale",
]

SCALES = [0, -1.0, 2.0**-140, 1e39, float("nan"), float("inf")]

CASES = [*OUT_OF_RANGE, *(({"scale": scale}, ABOVE_ZERO) for scale in SCALES)]


def make(**arguments):
    wrapper = static_loss_scaling if "scale" in arguments else dynamic_loss_scaling
    return wrapper(optax.sgd(0.1), **arguments)


@pytest.mark.parametrize(("arguments", "allowed"), CASES)
def test_numbers_out_of_range(arguments, allowed):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=re.escape(RANGE.format(name, repr(value), allowed))):
        make(**arguments)


@pytest.mark.parametrize("name", [*FIELDS, "scale"])
@pytest.mark.parametrize(("value", "message"), NO_NUMBERS, ids=repr)
def test_what_is_no_number(name, value, message):
    with pytest.raises(TypeError, match="^" + re.escape(f"{name} {message}") + "$"):
        make(**{name: value})


@pytest.mark.parametrize("bad", [np.ones(2, np.float32), np.array(True)], ids=["vector", "bool"])
def test_shape_and_dtype_of_jax_arrays_are_checked_and_their_values_are_not(bad):
    for name in FIELDS:
        with pytest.raises(TypeError, match=f"^{name} must be a real number, got an array of"):
            make(**{name: jnp.asarray(bad)})
    assert float(dynamic(jnp.float32(0.25)).scale) == 0.25
    jax.eval_shape(lambda scale: dynamic(scale, min_scale=scale), jnp.float32(8))


@pytest.mark.parametrize(
    "value",
    [8, 8.0, np.float32(8), np.int64(8), np.float16(8), np.array(8), np.array(8.0)],
    ids=repr,
)
def test_every_kind_of_number_is_taken(value):
    state = dynamic(
        value, growth_factor=value, growth_interval=value, min_scale=value, max_scale=value
    )
    assert (float(state.scale), int(state.growth_interval)) == (8.0, 8)


def test_no_field_shares_a_buffer_with_another_or_with_an_argument():
    """A training step that donates its state would delete it."""
    scale = jnp.float32(8)
    tx = static_loss_scaling(optax.sgd(1.0), scale)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    for _ in range(2):  # init reads the argument again
        _, state = update(jnp.asarray(np.ones(2, np.float32)), tx.init(np.ones(2)))
        assert float(state.loss_scale.scale) == 8.0
    interval = jnp.int32(1)
    tx = dynamic_loss_scaling(optax.sgd(1.0), growth_interval=interval, init_scale=scale)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    state = tx.init(np.ones(2))
    for expected in (16.0, 32.0):
        _, state = update(jnp.asarray(np.ones(2, np.float32)), state)
        assert float(state.loss_scale.scale) == expected
    assert (float(scale), int(interval)) == (8.0, 1)
