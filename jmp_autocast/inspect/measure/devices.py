"""Where values are: whether one device holds a program, and how a value elsewhere is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ...interpreters.compat import (
    ClosedJaxpr,
    Tracer,
    device_varying,
    is_array_aval,
    is_on_host,
    summed_sharding,
    varying_axes,
)
from ...interpreters.primitives.structure import equations_in
from .measured import is_measurable

# What puts values on devices that the arguments need not be on.
_SPREADING = frozenset(("shard_map", "sharding_constraint", "reshard", "device_put"))


def is_on_one_device(closed: ClosedJaxpr, arrays: Sequence[Any]) -> bool:
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


def on_this_mesh(tree: Any) -> Any:
    """Returns small arrays, such as counts, on the mesh of the trace, whole on each device.

    Args:
        tree: A pytree of arrays; what is on the mesh of the trace, or on none, is returned as it
            is.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def moved(x: Any) -> Any:
        own = _mesh_of(x)
        if own is None or own == mesh or mesh.empty:
            return x
        return jax.reshard(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(moved, tree)


def on_each_device(tree: Any) -> Any:
    """Returns small arrays whole on each device of their own mesh, so that each may be sliced.

    Args:
        tree: A pytree of arrays.
    """

    def whole(x: Any) -> Any:
        own = _mesh_of(x)
        return x if own is None else jax.reshard(x, NamedSharding(own, PartitionSpec()))

    return jax.tree.map(whole, tree)


def on_mesh_of(x: Any) -> AbstractContextManager[Any]:
    """Returns the context in which operations on an array run on its own mesh."""
    own = _mesh_of(x)
    return contextlib.nullcontext() if own is None else jax.sharding.use_abstract_mesh(own)


def _mesh_of(x: Any) -> Any:
    """Returns the mesh that is part of an array's type, None without one."""
    if not isinstance(x, jax.Array):
        return None
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def materialized(x: Any) -> Any:
    """Returns an array that XLA computes once, however many reductions read it.

    XLA would fuse the cheap equations that lead to it into each reduction, and compile them as
    often. An ``optimization_barrier`` prevents that on devices; the CPU backend drops barriers
    before it fuses, but it never fuses through a branch.

    Args:
        x: A result of an equation; what is not measured is returned as it is.
    """

    def other(x: Any) -> Any:
        # Like the array also in its sharding, which is a part of its type on an explicit mesh.
        return device_varying(jnp.zeros_like(x), varying_axes(x))

    def through_branch(x: Any) -> Any:
        # The barrier hides from the compiler that the condition is a constant.
        return lax.cond(lax.optimization_barrier(jnp.bool_(True)), lambda x: x, other, x)

    # An array that is no tracer has been computed.
    if not isinstance(x, Tracer) or not is_measurable(aval := jax.typeof(x)):
        return x
    if not is_whole_on_device(aval):
        return x
    return lax.platform_dependent(x, cpu=through_branch, default=lax.optimization_barrier)
