"""``argnums`` of `compare` and `tune`: which positional arguments they differentiate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp


def positions_of(argnums: Any) -> tuple[Any, ...]:
    """Returns ``argnums`` as a tuple, which is empty for None."""
    if argnums is None:
        return ()
    return tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)


def differentiated(
    argnums: Any,
    count: int,
    paths: Sequence[str],
    arrays: Sequence[Any],
    untrained: Callable[[str], bool],
) -> list[int]:
    """Returns the positions, among the flat arrays of a call, of what is differentiated.

    Args:
        argnums: The positions of arguments.
        count: How many positional arguments the call has.
        paths: The path of each array: its first name is the position of its argument.
        arrays: The arrays.
        untrained: As for `arguments.Opened`.
    """
    roots = {str(number % count) for number in positions_of(argnums)}
    return [
        i
        for i, (path, x) in enumerate(zip(paths, arrays, strict=True))
        if path.split("/", 1)[0] in roots
        and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and not untrained(path)
    ]


def check_range(argnums: Any, count: int, of: str) -> None:
    """Raises TypeError for what is no position, and ValueError for that of no argument.

    Args:
        argnums: The positions.
        count: How many positional arguments there are.
        of: What has them, up to the number.
    """
    positions = positions_of(argnums)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in positions):
        raise TypeError(
            "argnums must be the position of an argument, or several positions, got "
            f"{argnums!r}. Write argnums=0 for the first argument."
        )
    if not all(-count <= i < count for i in positions):
        raise ValueError(
            f"argnums={argnums!r} must name positional arguments of {of} {count}, numbered from 0. "
            "Write argnums=0 for the first argument."
        )
