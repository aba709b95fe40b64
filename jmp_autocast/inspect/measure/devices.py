"""Whether a program may run equation by equation: on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

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
