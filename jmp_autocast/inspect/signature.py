"""The static part of a call and of its results, in the form that `jax.jit` takes."""

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
    """The result of a jitted function: arrays, and a hashable value known from tracing.

    A call that finds its trace in JAX's cache gets the same static value.
    """

    arrays: Any
    static: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Signature:
    """The structure of arguments, and the leaves that are no arrays.

    Two signatures are equal if one trace serves both calls.

    Args:
        tree: The tree structure of the arguments.
        static: The leaves that are no arrays, by position.
        key: `_key` of each of these leaves; it alone is compared.
    """

    tree: Any
    static: dict[int, Any] = dataclasses.field(compare=False)
    key: tuple[Any, ...]

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """Returns the arguments with other arrays."""
        # `static` is in the order of positions, so that each insertion finds the leaves before it
        # in place.
        leaves = list(arrays)
        for i, leaf in self.static.items():
            leaves.insert(i, leaf)
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def is_constant(self) -> bool:
        """False if a leaf has no hash: such a leaf may be mutated, and still equals itself."""
        return has_hash((self.tree, self.key))

    def __hash__(self) -> int:
        # The hash leaves out the leaves and the tree: either may hold an object without a hash.
        return hash((self.tree.num_leaves, *((i, type(x)) for i, x in self.static.items())))


def _key(position: int, leaf: Any) -> tuple[Any, ...]:
    """Returns equal keys for static leaves that one trace serves.

    The type counts: 1 equals True, but ``x * True`` differs. The text of a float counts: 0.0 equals
    -0.0, and NaN equals nothing.
    """
    return position, type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def split(arguments: Any) -> tuple[Signature, list[Any]]:
    """Returns the signature of a pytree of arguments, and its arrays, which `autocast` traces."""
    leaves, tree = jax.tree.flatten(arguments)
    static = {i: leaf for i, leaf in enumerate(leaves) if not is_array(leaf)}
    key = tuple(_key(i, leaf) for i, leaf in static.items())
    return Signature(tree, static, key), [leaf for leaf in leaves if is_array(leaf)]
