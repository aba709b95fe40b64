"""Copies of a source: casts, and encodings by an extension, which may also plan products.

An extension, such as float8, defines an `Encoding`, which is the key of its copies, and a `Tag`,
which the planner propagates with a source. Both are opaque here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import jax
import numpy as np

from ...policies import Policy
from ..compat import AnyJaxpr, with_dtype
from ..regions import PlansProduct


class Tag(Protocol):
    """An extension's data about a source. It is hashable, as `ValueState` is."""

    @property
    def in_slices(self) -> bool:
        """Whether copies of the source are encoded slice by slice, along its first dimensions."""
        ...

    def moved(self, is_whole: bool) -> Tag | None:
        """Returns the tag after a move, of all elements (``is_whole``) or of some."""
        ...

    def sliced(self) -> Tag | None:
        """Returns the tag of a slice along the first dimension, which a loop iteration reads."""
        ...

    def gives(self, key: CopyKey) -> bool:
        """Returns whether a loop takes slices of a copy, in place of slices of the source."""
        ...


class Encoding(Protocol):
    """The key of a copy that is no cast. It is hashable."""

    @property
    def when_moved(self) -> Literal["moves", "stays", "anew"]:
        """Says whether the copy of a moved array moves, too, stays the same, or is made anew."""
        ...

    def copies(self, x: Any, known: Mapping[CopyKey, Any], tag: Tag | None) -> dict[CopyKey, Any]:
        """Returns the copy of an array, and the copies that are computed along with it.

        Args:
            x: The array.
            known: Its copies so far.
            tag: Its tag.
        """
        ...

    def enters(self, tag: Tag | None, runs_again: bool) -> bool:
        """Returns whether a call outside of loops takes the copy as an operand.

        Args:
            tag: The tag of the source.
            runs_again: The call is a checkpoint: its operands are residuals.
        """
        ...


CopyKey: TypeAlias = np.dtype | Encoding
"""The key of a copy of a value: the dtype that it is cast to, or an extension's encoding."""


@functools.lru_cache(maxsize=4096)
def copy_aval(aval: Any, key: CopyKey, tag: Tag | None) -> Any:
    """Returns the type of a copy of an array.

    Args:
        aval: The type of the array.
        key: The key of the copy.
        tag: The tag of the array.
    """
    if isinstance(key, np.dtype):
        return with_dtype(aval, key)
    # The type comes from a trace, because in a `shard_map` a scale varies along the mesh axes of
    # its array.
    return jax.make_jaxpr(lambda x: key.copies(x, {}, tag)[key])(aval).out_avals[0]


class Products(Protocol):
    """An extension's planner of the products of one program."""

    @property
    def tag(self) -> Tag:
        """The tag of the program's parameters."""
        ...

    def look_at(self, jaxpr: AnyJaxpr) -> None:
        """Reads the program before it is planned; the jaxpr outlives this object."""
        ...

    def in_scope(self, name: str) -> PlansProduct | None:
        """Returns a function that plans the products of a region, None for plain 16-bit products.

        Args:
            name: The policy's choice for the scope, "" without one.
        """
        ...


_PRODUCTS: list[Callable[[Policy], Products | None]] = []
plans_products: Callable[[Callable[[Policy], Products | None]], None] = _PRODUCTS.append
"""Registers an extension: a function from a policy to `Products`, None if it is not used."""


def products_of(policy: Policy) -> Products | None:
    """Returns the planner of products under a policy, None if all are in the compute dtype."""
    return next(filter(None, (extension(policy) for extension in _PRODUCTS)), None)
