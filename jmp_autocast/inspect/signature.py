"""What is static in a call and in what it returns, in the forms that `jax.jit` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..arguments import is_array


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


class Signature:
    """The structure of arguments, and those of their leaves that are no arrays.

    Signatures are equal where one trace serves both calls.

    Args:
        tree: The structure of the arguments.
        static: The leaves that are no arrays, each with its position.
    """

    def __init__(self, tree: Any, static: Sequence[tuple[int, Any]]) -> None:
        self._tree = tree
        self._static = tuple(static)

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """Returns the arguments with some arrays in them."""
        leaves = list(arrays)
        for i, leaf in self._static:
            leaves.insert(i, leaf)
        return jax.tree.unflatten(self._tree, leaves)

    @property
    def is_constant(self) -> bool:
        """False if a leaf has no hash: it may have changed, and would still equal itself."""
        try:
            hash((self._tree, self._static))
        except TypeError:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Signature)
            and self._tree == other._tree
            and len(self._static) == len(other._static)
            and all(
                i == k and _same(x, y)
                for (i, x), (k, y) in zip(self._static, other._static, strict=True)
            )
        )

    def __hash__(self) -> int:
        # Without the leaves and the tree itself: either may hold something without a hash.
        return hash((self._tree.num_leaves, *((i, type(leaf)) for i, leaf in self._static)))

    def text(self, arrays: Sequence[Any]) -> str:
        """Returns the signature as text, with the types of arrays."""
        types = [str(jax.typeof(x)) for x in arrays]
        return f"{self._tree} of {', '.join([*types, *(repr(x) for _, x in self._static)])}"


def _same(x: Any, y: Any) -> bool:
    """True for static leaves that the same trace serves."""
    if type(x) is not type(y):  # 1 equals True, and `x * 1` is no bool
        return False
    if isinstance(x, float | complex):  # 0.0 equals -0.0, and NaN equals nothing
        return repr(x) == repr(y)
    return x is y or bool(x == y)


def split(arguments: Any) -> tuple[Signature, list[Any]]:
    """Returns the signature of arguments, and their arrays.

    Args:
        arguments: Any pytree. What `autocast` traces is an array; everything else is static.
    """
    leaves, tree = jax.tree.flatten(arguments)
    static = [(i, leaf) for i, leaf in enumerate(leaves) if not is_array(leaf)]
    return Signature(tree, static), [leaf for leaf in leaves if is_array(leaf)]
