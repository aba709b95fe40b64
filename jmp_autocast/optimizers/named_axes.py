"""Variables of Flax NNX name the axes of their arrays: scales of blocks have others than codes.

An ``nnx.Optimizer`` hands its parameters as variables to ``init``, and what `optax` makes of them
keeps their metadata. Nothing of Flax is imported for it.
"""

from __future__ import annotations

from typing import Any

import jax

# The names that Flax and `nnx.Optimizer` place an array by.
_PLACED_BY = ("out_sharding", "optimizer_sharding")


def is_variable(node: Any) -> bool:
    """Returns whether a node of a tree is an array with metadata."""
    return hasattr(node, "set_metadata") and hasattr(node, "get_metadata")


def lie_as_they_divide(node: Any) -> None:
    """Takes the names off a variable that its array, scales in place of codes, does not divide by.

    Which devices a name stands for is not known here: each axis of a mesh divides the number of
    all its devices. Without a mesh those are all that there are.

    Args:
        node: A variable of scales, with the names of the codes; anything else is left alone.
    """
    if not is_variable(node):
        return
    shape = getattr(node.get_value(), "shape", ())
    for key in _PLACED_BY:
        names = node.get_metadata(key, None)
        if names:
            node.set_metadata(key, _fitting(names, shape))


def _fitting(names: Any, shape: tuple[int, ...]) -> Any:
    if not shape or not isinstance(names, tuple | jax.sharding.PartitionSpec):
        return None  # a number, or a sharding of codes that names its devices
    mesh = jax.sharding.get_abstract_mesh()
    devices = jax.device_count() if mesh.empty else mesh.size
    if len(names) < len(shape) or shape[-1] % devices == 0:
        return names
    fitting = (*names[:-1], None)
    return fitting if isinstance(names, tuple) else jax.sharding.PartitionSpec(*fitting)
