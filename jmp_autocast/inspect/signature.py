"""The static parts of a call's arguments and results, in a form that `jax.jit` accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..call.arguments import is_array
from ..policies.callables import has_hash


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Traced:
    """The result of a jitted function: arrays, and a hashable ``static`` value from its tracing.

    If JAX's cache already holds the trace of a call, the call returns the ``static`` value of that
    trace.
    """

    arrays: Any
    static: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Signature:
    """The tree structure of a call's arguments, and their leaves that are no arrays.

    Two signatures are equal if one trace serves both calls.

    Args:
        tree: The tree structure of the arguments.
        static: The leaves that are no arrays, by position.
        key: The `_key` of each static leaf, compared in place of the leaf.
    """

    tree: Any
    static: dict[int, Any] = dataclasses.field(compare=False)
    key: tuple[Any, ...]

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """Returns the arguments with ``arrays`` in place of their arrays."""
        # `static` is sorted by position, so each leaf is inserted after all leaves before it.
        leaves = list(arrays)
        for i, leaf in self.static.items():
            leaves.insert(i, leaf)
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def is_constant(self) -> bool:
        """Whether all static leaves have hashes: a leaf without one may change between calls."""
        return has_hash((self.tree, self.key))

    def __hash__(self) -> int:
        # The tree and the values of the leaves are no part of the hash: they may hold objects
        # without a hash.
        return hash((self.tree.num_leaves, *((i, type(x)) for i, x in self.static.items())))


def _key(position: int, leaf: Any) -> tuple[Any, ...]:
    """Returns the key of a static leaf; leaves have equal keys if one trace serves both.

    The key has the type, because 1 equals True, but ``x * True`` differs from ``x * 1``. It has the
    text of a float, because 0.0 equals -0.0, and NaN does not equal itself.
    """
    return position, type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def split(arguments: Any) -> tuple[Signature, list[Any]]:
    """Returns the signature of a pytree of arguments, and its array leaves."""
    leaves, tree = jax.tree.flatten(arguments)
    static = {i: leaf for i, leaf in enumerate(leaves) if not is_array(leaf)}
    key = tuple(_key(i, leaf) for i, leaf in static.items())
    return Signature(tree, static, key), [leaf for leaf in leaves if is_array(leaf)]
