"""What is said of arguments that cannot be used, where several functions say the same."""

from __future__ import annotations

from typing import Any

from .export import cut


def wrong_type(must: str, value: Any, fix: str) -> TypeError:
    """Returns the error about an argument of another type than it must have.

    Args:
        must: The argument, and what it must be.
        value: What was given.
        fix: What to write instead.
    """
    # A message is read in a terminal: the text of a parameter tree would push its start away.
    return TypeError(f"{must}, got {cut(repr(value), 80)} of type {type(value).__name__}. {fix}")


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
