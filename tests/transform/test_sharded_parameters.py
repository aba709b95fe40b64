"""Parameters sharded over devices, FSDP style: what travels between them is 16 bits."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmp_autocast import autocast

DEVICES = 8


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x))


@pytest.fixture
def sharded():
    """Two square weights and a batch, each split by rows over the devices."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.device_put(jax.random.normal(k, (64, 64)) / 8, rows) for k in keys[:2]]
    return weights, jax.device_put(jax.random.normal(keys[2], (32, 64)), rows), rows


def gathered(compiled):
    """(dtype, shape) of what each all-gather of an optimized program moves."""
    return re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", compiled.as_text())


def test_gathered_parameters_are_16_bits(sharded):
    """float16, because XLA's CPU backend moves bfloat16 as float32.

    Of parameters alone: on a CPU the factors of a weight's gradient are widened where they lie.
    """
    weights, x, rows = sharded
    found = {}
    for name, fn in (("float32", loss), ("float16", autocast(loss))):
        gradient = jax.jit(jax.grad(fn), out_shardings=[rows, rows])
        moved = gathered(gradient.lower(weights, x).compile())
        found[name] = [dtype for dtype, shape in moved if shape == "64,64"]
    assert found == {"float32": ["f32"] * len(weights), "float16": ["f16"] * len(weights)}


def test_parameters_gathered_by_a_constraint_are_16_bits(sharded):
    weights, x, rows = sharded
    whole = NamedSharding(rows.mesh, PartitionSpec())

    def gathering(weights, x):
        return loss(jax.lax.with_sharding_constraint(weights, whole), x)

    gradient = jax.jit(jax.grad(autocast(gathering)), out_shardings=[rows, rows])
    moved = gathered(gradient.lower(weights, x).compile())
    assert moved == [("f16", "64,64")] * len(weights)
