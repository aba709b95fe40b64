"""Where values are: whether one device holds a program, and how a value elsewhere is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...interpreters.compat import is_array_aval, is_on_host, summed_sharding
from ...interpreters.primitives.structure import equations_in

# What puts values on devices that the arguments need not be on.
_SPREADING = frozenset(("shard_map", "sharding_constraint", "reshard", "device_put"))


def is_on_one_device(closed: Any, arrays: Sequence[Any]) -> bool:
    """Returns whether no equation needs several devices.

    Equation by equation, many small programs of several devices are in flight at once, and XLA's
    CPU backend, which simulates devices by threads, aborts where two wait for each other's.

    Args:
        closed: The jaxpr.
        arrays: Its arguments.
    """
    devices = {device for x in arrays if isinstance(x, jax.Array) for device in x.devices()}
    return len(devices) <= 1 and not any(
        eqn.primitive.name in _SPREADING for eqn, _ in equations_in(closed)
    )


def is_whole_on_device(aval: Any) -> bool:
    """Returns whether JAX has all operations for arrays of a type; see `readable`."""
    return not is_on_host(aval) and summed_sharding(aval) is None


def readable(x: Any) -> Any:
    """Returns an array of floats in the memory of the devices, and with the plainest sharding.

    A program may keep an array in the host's memory, or mark it as `reduced` or `unreduced` over
    devices; JAX has few operations for these.

    Args:
        x: An array.
    """
    aval = jax.typeof(x)
    if is_on_host(aval):
        x = jax.device_put(x, jax.memory.Space.Device)
    whole = summed_sharding(aval)
    return x if whole is None else jax.reshard(x, whole)


def on_device(x: Any) -> Any:
    """Returns an argument as the value that an equation takes.

    The rewriter takes a number that is no array for one that is known when it traces.

    Args:
        x: An array, a number, what JAX converts to an array, or a value of another type of JAX,
            such as a hijax variable of Flax, which could be converted and shall not be.
    """
    if isinstance(x, jax.Array):
        return x
    try:
        is_other = not is_array_aval(jax.typeof(x))
    except TypeError:  # it is no value of JAX yet
        is_other = False
    return x if is_other else jnp.asarray(x)
