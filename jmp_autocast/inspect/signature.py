"""What is static in a call and in what it returns, in the forms that `jax.jit` takes."""

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
    """What a jitted function returns: arrays, and what is known since it was traced.

    Args:
        arrays: The arrays.
        static: Anything with a hash. A call that finds its trace in JAX's cache gets the same.
    """

    arrays: Any
    static: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Signature:
    """The structure of arguments, and those of their leaves that are no arrays.

    Signatures are equal where one trace serves both calls.

    Args:
        tree: The structure of the arguments.
        static: The leaves that are no arrays, by their positions.
        key: What `_key` says of each of them. It alone is compared.
    """

    tree: Any
    static: dict[int, Any] = dataclasses.field(compare=False)
    key: tuple[Any, ...]

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """Returns the arguments with some arrays in them."""
        # In the order of their positions: each insertion finds the leaves before it in place.
        leaves = list(arrays)
        for i, leaf in self.static.items():
            leaves.insert(i, leaf)
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def is_constant(self) -> bool:
        """False if a leaf has no hash: it may have changed, and would still equal itself."""
        return has_hash((self.tree, self.key))

    def __hash__(self) -> int:
        # Without the leaves and the tree itself: either may hold something without a hash.
        return hash((self.tree.num_leaves, *((i, type(x)) for i, x in self.static.items())))

    def text(self, arrays: Sequence[Any]) -> str:
        """Returns the signature as text, with the types of arrays."""
        types = [str(jax.typeof(x)) for x in arrays]
        return f"{self.tree} of {', '.join([*types, *map(repr, self.static.values())])}"


def _key(position: int, leaf: Any) -> tuple[Any, ...]:
    """Returns what is equal for static leaves that the same trace serves.

    1 equals True, and ``x * 1`` is no bool: so the type counts. 0.0 equals -0.0, and NaN equals
    nothing: so the text of a float counts.
    """
    return position, type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def split(arguments: Any) -> tuple[Signature, list[Any]]:
    """Returns the signature of arguments, and their arrays.

    Args:
        arguments: Any pytree. What `autocast` traces is an array; everything else is static.
    """
    leaves, tree = jax.tree.flatten(arguments)
    static = {i: leaf for i, leaf in enumerate(leaves) if not is_array(leaf)}
    key = tuple(_key(i, leaf) for i, leaf in static.items())
    return Signature(tree, static, key), [leaf for leaf in leaves if is_array(leaf)]
