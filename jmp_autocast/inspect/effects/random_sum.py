"""A scalar of a program's results, whose change says the relative error of them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def floats_in(arrays: Sequence[Any]) -> list[Any]:
    """Returns the float arrays among the results of a program.

    Args:
        arrays: The results.
    """
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]


def norms_of(arrays: Sequence[Any], together: bool) -> list[Any]:
    """Returns the norm of each array, without what is not finite, or that of all of them for each.

    Args:
        arrays: The arrays.
        together: The norm of all of them.
    """
    wide = [jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) for x in arrays]
    squares = [jnp.sum(x * x) for x in wide]
    if together:
        squares = [sum(squares, jnp.float32(0))] * len(squares)
    return [jnp.where(x > 0, jnp.sqrt(x), 1.0) for x in squares]


def random_sum(arrays: Sequence[Any], together: bool) -> Any:
    """Returns a sum of all elements with random signs, in units of a norm.

    Of independent errors of the elements, the mean square of its change is the square of their norm
    in these units: the relative error (Hutchinson's estimate). The norm is not differentiated.

    Args:
        arrays: Float arrays.
        together: In units of the norm of all arrays; else each in units of its own.
    """
    keys = jax.random.split(jax.random.key(0), max(len(arrays), 1))
    norms = jax.lax.stop_gradient(norms_of(arrays, together))
    total = jnp.float32(0)
    for x, key, norm in zip(arrays, keys, norms, strict=False):
        signs = jax.random.rademacher(key, x.shape, jnp.float32)
        total += jnp.sum(jnp.where(jnp.isfinite(x), x * signs, 0.0)) / norm
    return total
