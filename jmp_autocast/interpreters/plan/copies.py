"""Copies of a source: casts, and those that another room makes, of values that it has tagged.

A room that stores or multiplies a value in a form of its own brings an `Encoding`, by which its
copies are found, and a `Tag`, which goes where the value goes. Nothing here knows either.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

import jax
import numpy as np

from ..compat import with_dtype


class Tag(Protocol):
    """What a room knows of a source. It has a hash, as `ValueState` has."""

    @property
    def in_slices(self) -> bool:
        """Whether its encoded copies are made slice by slice, along its first dimensions."""
        ...

    def moved(self, is_whole: bool) -> Tag | None:
        """Returns the tag of what is made of the elements, of all of them or not."""
        ...

    def sliced(self) -> Tag | None:
        """Returns the tag of a slice along the first dimension, as a loop reads it."""
        ...

    def gives(self, key: CopyKey) -> bool:
        """Returns whether a loop gets slices of a copy, in place of slices of the source."""
        ...


class Encoding(Protocol):
    """What a copy that is no cast is found by. It has a hash."""

    @property
    def when_moved(self) -> Literal["moves", "stays", "anew"]:
        """The copy of an array of which all elements are moved: that is moved, the same, or new."""
        ...

    def copies(self, x: Any, known: Mapping[CopyKey, Any], tag: Tag | None) -> dict[CopyKey, Any]:
        """Returns the copy of an array, and what is made with it.

        Args:
            x: The array.
            known: The copies of it that there are.
            tag: Its tag.
        """
        ...

    def enters(self, tag: Tag | None, runs_again: bool) -> bool:
        """Returns whether a call takes the copy from outside, though it runs once.

        Args:
            tag: The tag of the source.
            runs_again: The call is a checkpoint: what it takes is kept for the backward pass.
        """
        ...


CopyKey: TypeAlias = np.dtype | Encoding
"""What a copy of a value is found by: the dtype that it is cast to, or a room's encoding."""


@functools.lru_cache(maxsize=4096)
def copy_aval(aval: Any, key: CopyKey, tag: Tag | None) -> Any:
    """Returns the type of a copy of an array.

    Args:
        aval: The type of the array.
        key: What the copy is found by.
        tag: The tag of the array.
    """
    if isinstance(key, np.dtype):
        return with_dtype(aval, key)
    # Traced, because a sum over an array in a `shard_map` differs along the axes the array does.
    return jax.make_jaxpr(lambda x: key.copies(x, {}, tag)[key])(aval).out_avals[0]
