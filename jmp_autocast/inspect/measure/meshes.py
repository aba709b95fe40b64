"""Arrays of different meshes in one program.

On an explicit mesh a sharding is a part of a type, and JAX takes operands of one mesh alone. What
`jax.sharding.auto_axes` holds runs on another mesh than what stands around it: of the same devices,
with other types of axes. What is measured there has to come out, and what is known has to go in.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


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
