"""What `tune` says of arguments that it cannot use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...arguments import check_function
from ...transform import Autocast
from .batches import Batch


def check(fn: Any, tolerance: Any, accept: Any, argnums: Any) -> None:
    """Raises TypeError or ValueError for arguments that are wrong whatever the batches hold."""
    check_function(fn, "tune", "Pass the function itself, then batches of its arguments.")
    if isinstance(fn, Autocast):
        raise ValueError(
            f"tune got {fn!r}, which autocast has already wrapped, and tries policies itself. Pass "
            "the function that was wrapped, and its policy as policy=."
        )
    if (tolerance is None) == (accept is None):
        given = "neither" if accept is None else "both"
        raise ValueError(
            f"tune needs exactly one of tolerance and accept, got {given}. Write tolerance=0.01, "
            "or accept=function with a function of the function in mixed precision."
        )
    if accept is not None and not callable(accept):
        raise TypeError(
            f"accept must be a function of the function in mixed precision, got {accept!r} of type "
            f"{type(accept).__name__}. For a largest error write tolerance=."
        )
    if tolerance is not None and (
        isinstance(tolerance, bool) or not isinstance(tolerance, int | float | np.number)
    ):
        raise TypeError(
            f"tolerance must be a number, got {tolerance!r} of type {type(tolerance).__name__}. "
            "Write the largest relative error, such as tolerance=0.01."
        )
    if tolerance is not None and not 0 < float(tolerance) < math.inf:
        raise ValueError(
            f"tolerance must be a positive number, got {tolerance}. Write the largest relative "
            "error, such as tolerance=0.01."
        )
    positions = positions_of(argnums)
    if argnums is not None and not (
        positions and all(isinstance(i, int) and not isinstance(i, bool) for i in positions)
    ):
        raise TypeError(
            "argnums must be the position of an argument, or several positions, got "
            f"{argnums!r}. Write argnums=0 for the first argument."
        )


def check_range(argnums: Any, batches: Sequence[Batch]) -> None:
    """Raises ValueError where a batch has no such positional argument."""
    count = min(len(batch.args) for batch in batches)
    if not all(-count <= i < count for i in positions_of(argnums)):
        raise ValueError(
            f"argnums={argnums!r} must name positional arguments of each batch, which have "
            f"{count}, numbered from 0. Write argnums=0 for the first argument."
        )


def positions_of(argnums: Any) -> tuple[Any, ...]:
    """Returns ``argnums`` as a tuple."""
    if argnums is None:
        return ()
    return tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)


def as_bool(accepted: Any) -> bool:
    """Returns what ``accept`` said; TypeError if that is no bool."""
    if isinstance(accepted, bool | np.bool_) or (
        isinstance(accepted, jax.Array) and accepted.shape == () and accepted.dtype == jnp.bool_
    ):
        return bool(accepted)
    raise TypeError(
        f"accept must return a bool, got {accepted!r} of type {type(accepted).__name__}. Return "
        "True if the function that it is given is good enough."
    )
