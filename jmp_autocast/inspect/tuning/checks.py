"""What `tune` says of arguments that it cannot use."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...autocast import Autocast
from ...call.arguments import check_function
from ...policies.errors import wrong_type
from ..argnums import positions_of


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
        must = "accept must be a function of the function in mixed precision"
        raise wrong_type(must, accept, "For a largest error write tolerance=.")
    fix = "Write the largest relative error, such as tolerance=0.01."
    # True is an int, and 1.0 as a tolerance: 100 % of error, which nobody means.
    is_number = isinstance(tolerance, int | float | np.number) and not isinstance(tolerance, bool)
    if tolerance is not None and not is_number:
        raise wrong_type("tolerance must be a number", tolerance, fix)
    if tolerance is not None and not 0 < float(tolerance) < math.inf:
        raise ValueError(f"tolerance must be a positive number, got {tolerance}. {fix}")
    positions = positions_of(argnums)
    if argnums is not None and not (
        positions and all(isinstance(i, int) and not isinstance(i, bool) for i in positions)
    ):
        raise TypeError(
            "argnums must be the position of an argument, or several positions, got "
            f"{argnums!r}. Write argnums=0 for the first argument."
        )


def as_bool(accepted: Any) -> bool:
    """Returns what ``accept`` said; TypeError if that is no bool."""
    if isinstance(accepted, bool | np.bool_) or (
        isinstance(accepted, jax.Array) and accepted.shape == () and accepted.dtype == jnp.bool_
    ):
        return bool(accepted)
    fix = "Return True if the function that it is given is good enough."
    raise wrong_type("accept must return a bool", accepted, fix)
