"""The calls that `tune` and `explain_effects` make: of their arguments, or of each batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ..call.arguments import is_array
from ..policies.errors import wrong_type

_FIX = "Write batches=[(params, x1), (params, x2)], with a tuple of arguments for each call."


def calls_of(by: str, args: tuple[Any, ...], batches: Any) -> list[tuple[Any, ...]]:
    """Returns the positional arguments of each call.

    Args:
        by: The public function that takes both.
        args: The arguments of the one call.
        batches: Instead of them, a tuple of arguments for each call.

    Raises:
        TypeError: The batches are no tuples, or hold no arrays.
        ValueError: Both are given, or no batch.
    """
    if batches is not None and args:
        raise ValueError(f"{by} takes arguments or batches, got {len(args)} and batches. {_FIX}")
    is_list = len(args) == 1 and isinstance(args[0], list) and bool(args[0])
    if is_list and all(isinstance(each, tuple) for each in args[0]):
        raise TypeError(f"{by} got a list of tuples, which would be one argument. {_FIX}")
    if batches is None:
        batches = [args]
    elif isinstance(batches, str | dict) or is_array(batches) or not isinstance(batches, Iterable):
        raise wrong_type("batches must be an iterable of tuples", batches, _FIX)
    calls = list(batches)
    for i, call in enumerate(calls):
        if not isinstance(call, tuple):
            raise wrong_type(f"batches[{i}] must be a tuple of arguments", call, _FIX)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(call)):
            where = "an argument" if args else f"batches[{i}]"
            raise TypeError(
                f"{by} runs the function and needs arrays, got a jax.ShapeDtypeStruct in {where}. "
                "Pass arrays of typical values, or use explain, which computes nothing."
            )
    if not calls:
        raise ValueError(f"batches must hold at least one tuple of arguments, got none. {_FIX}")
    return calls
