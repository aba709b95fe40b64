"""The calls that tools make, of their arguments or of each batch, and their ``argnums``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..autocast import opened
from ..call.arguments import Call, flatten, is_array
from ..interpreters.compat import ClosedJaxpr, aval_of, body_of, fresh_make_jaxpr, mark_frames
from ..policies.errors import shown, wrong_type

mark_frames(__file__)

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


def check_concrete(by: str, arguments: Any, fix: str = "Pass arrays.") -> None:
    """Raises TypeError where an argument is the type of an array, as `explain` takes it.

    Args:
        by: The public function that runs the call.
        arguments: Those of the call.
        fix: What to do instead.
    """
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{by} runs the function and needs arrays, got {shown(leaf)} of type "
                f"{type(leaf).__name__}. {fix}"
            )


def returned_by(closed: ClosedJaxpr) -> tuple[list[Any], str]:
    """Returns the types of what a program returns, and these in words."""
    avals = [aval_of(v) for v in body_of(closed).outvars]
    return avals, ", ".join(map(str, avals)) or "nothing"


def is_loss(avals: Sequence[Any]) -> bool:
    """Returns whether the first of what a program returns is a scalar float."""
    return bool(avals) and avals[0].shape == () and jnp.issubdtype(avals[0].dtype, jnp.floating)


def traced(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], abstract: bool = False
) -> tuple[Call, ClosedJaxpr]:
    """Returns a call of any function, flattened, and its jaxpr.

    No argument is a parameter here: nothing is planned. What the call changes in its objects is
    lost, as nothing of it is looked at.

    Args:
        fn: The function.
        args: The positional arguments.
        kwargs: The keyword arguments.
        abstract: Take types of arrays as arrays.
    """
    with opened(fn, args, kwargs) as pure:
        call = flatten(pure.fn, (), pure.args, pure.kwargs, abstract)
        return call, fresh_make_jaxpr(call.traceable, *call.arrays)


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
