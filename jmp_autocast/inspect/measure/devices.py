"""Whether a program may run equation by equation, on one device, and on what it runs then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...interpreters.compat import is_array_aval
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
