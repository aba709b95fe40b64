"""Tests whether a program runs on one device, and moves values between devices and meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...interpreters import compat
from ...interpreters.primitives.structure import equations_in

# These primitives may place values on other devices than those of the arguments.
_SPREADING = frozenset(("shard_map", "sharding_constraint", "reshard", "device_put"))


def is_on_one_device(closed: compat.ClosedJaxpr, arrays: Sequence[Any]) -> bool:
    """Returns whether a jaxpr can run equation by equation: it and its arguments use one device.

    On several devices, the small programs of many equations would run at once. XLA's CPU backend
    simulates devices by threads, and aborts if two programs wait for each other's threads.
    """
    devices = {device for x in arrays if isinstance(x, jax.Array) for device in x.devices()}
    return len(devices) <= 1 and not any(
        eqn.primitive.name in _SPREADING for eqn, _ in equations_in(closed)
    )


def is_whole_on_device(aval: Any) -> bool:
    """Returns whether `readable` returns arrays of a type as they are."""
    return not compat.is_on_host(aval) and compat.summed_sharding(aval) is None


def readable(x: Any) -> Any:
    """Returns an array of floats in device memory, without `reduced` and `unreduced` axes.

    A program may keep an array in the host's memory, or mark it as `reduced` or `unreduced` over
    devices; JAX has few operations for such arrays.
    """
    aval = jax.typeof(x)
    if compat.is_on_host(aval):
        x = jax.device_put(x, jax.memory.Space.Device)
    whole = compat.summed_sharding(aval)
    return x if whole is None else jax.reshard(x, whole)


def on_device(x: Any) -> Any:
    """Returns an argument as a JAX array: the rewriter would treat a number as a constant.

    Values of other JAX types, such as a hijax variable of Flax, are returned as they are.
    """
    if isinstance(x, jax.Array):
        return x
    try:
        is_other = not compat.is_array_aval(jax.typeof(x))
    except TypeError:  # `x` has no JAX type until it is converted
        is_other = False
    return x if is_other else jnp.asarray(x)


def on_this_mesh(tree: Any) -> Any:
    """Returns small arrays, such as counts, replicated on the mesh of the current trace, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.tree.map(lambda x: x if _mesh_of(x) in (None, mesh) else _whole(x, mesh), tree)


def on_each_device(tree: Any) -> Any:
    """Returns small arrays replicated on their own mesh, so that each may be sliced."""
    return jax.tree.map(lambda x: x if (own := _mesh_of(x)) is None else _whole(x, own), tree)


def on_mesh_of(x: Any) -> AbstractContextManager[Any]:
    """Returns a context in which operations run on the mesh of an array."""
    own = _mesh_of(x)
    return contextlib.nullcontext() if own is None else jax.sharding.use_abstract_mesh(own)


def _whole(x: Any, mesh: Any) -> Any:
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec()))


def _mesh_of(x: Any) -> Any:
    """Returns the mesh in an array's type, None if it has none."""
    if not isinstance(x, jax.Array):
        return None
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh
