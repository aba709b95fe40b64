"""``argnums`` of `compare` and `tune`: which positional arguments they differentiate."""

from __future__ import annotations

from typing import Any


def positions_of(argnums: Any) -> tuple[Any, ...]:
    """Returns ``argnums`` as a tuple, which is empty for None."""
    if argnums is None:
        return ()
    return tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)


def check_range(argnums: Any, count: int, of: str) -> None:
    """Raises ValueError where there is no such positional argument.

    Args:
        argnums: The positions.
        count: How many positional arguments there are.
        of: What has them, up to the number.
    """
    if not all(isinstance(i, int) and -count <= i < count for i in positions_of(argnums)):
        raise ValueError(
            f"argnums={argnums!r} must name positional arguments of {of} {count}, numbered from 0. "
            "Write argnums=0 for the first argument."
        )
