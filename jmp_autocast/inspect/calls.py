"""Checks the arguments that users pass to the tools: ``args`` or ``batches``, and ``argnums``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..policies.errors import shown, wrong_type

_FIX = "Write batches=[(params, x1), (params, x2)], with a tuple of arguments for each call."


def calls_of(by: str, args: tuple[Any, ...], batches: Any) -> list[tuple[Any, ...]]:
    """Returns the positional arguments of each call that the public function ``by`` runs.

    A user gives either ``args``, the arguments of one call, or ``batches``, a tuple of arguments
    for each call.

    Raises:
        TypeError: A batch is not a tuple, or an argument is a ``jax.ShapeDtypeStruct``.
        ValueError: ``args`` and ``batches`` are both given, or ``batches`` is empty.
    """
    if batches is not None and args:
        raise ValueError(f"{by} takes arguments or batches, got {len(args)} and batches. {_FIX}")
    is_list = len(args) == 1 and isinstance(args[0], list) and bool(args[0])
    if is_list and all(isinstance(each, tuple) for each in args[0]):
        raise TypeError(f"{by} got a list of tuples, which would be one argument. {_FIX}")
    if batches is not None and not isinstance(batches, Iterable):
        raise wrong_type("batches must be an iterable of tuples", batches, _FIX)
    calls = [args] if batches is None else list(batches)
    for i, call in enumerate(calls):
        if not isinstance(call, tuple):
            raise wrong_type(f"batches[{i}] must be a tuple of arguments", call, _FIX)
        check_concrete(by if args else f"{by} of batches[{i}]", call)
    if not calls:
        raise ValueError(f"batches must hold at least one tuple of arguments, got none. {_FIX}")
    return calls


def check_concrete(by: str, arguments: Any) -> None:
    """Raises TypeError if an argument is a ``jax.ShapeDtypeStruct``: only `explain` accepts one."""
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{by} runs the function and needs arrays, got {shown(leaf)} of type "
                f"{type(leaf).__name__}. Pass arrays of typical values, or use explain, which "
                "computes nothing."
            )


def is_loss(avals: Sequence[Any]) -> bool:
    """Returns whether the first result of a program is a scalar float."""
    return bool(avals) and avals[0].shape == () and jnp.issubdtype(avals[0].dtype, jnp.floating)


def _positions(argnums: Any) -> tuple[Any, ...]:
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
    """Returns the positions of the differentiated arrays among the flat arrays of a call.

    Args:
        argnums: The positions of the differentiated arguments, as in ``jax.grad``.
        count: The number of positional arguments of the call.
        paths: The path of each array, such as ``"0/w"``: it begins with the argument's position.
        arrays: The flat arrays of the call.
        untrained: Returns whether the array at a path is never differentiated.
    """
    roots = {str(number % count) for number in _positions(argnums)}
    return [
        i
        for i, (path, x) in enumerate(zip(paths, arrays, strict=True))
        if path.split("/", 1)[0] in roots
        and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and not untrained(path)
    ]


def check_range(argnums: Any, count: int, of: str) -> None:
    """Raises unless ``argnums`` are positions among ``count`` positional arguments.

    ``of`` is the text before the count in the error message, such as "the call, which has".

    Raises:
        TypeError: An element is no integer.
        ValueError: An element is out of range.
    """
    positions = _positions(argnums)
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
