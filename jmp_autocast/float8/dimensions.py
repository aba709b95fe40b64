"""Dimension numbers of transposed and batched matrix products, and the shapes of their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

DimensionNumbers: TypeAlias = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]
"""The contracted dimensions of both operands, then the batch ones, as in ``lax.dot_general``."""


def free(numbers: DimensionNumbers, rank: int, i: int) -> list[int]:
    """Returns the dimensions of operand ``i`` that are neither contracted nor batch dimensions.

    Example:
        >>> free((((1,), (0,)), ((), ())), 2, 0)
        [0]
    """
    contracting, batch = numbers[0][i], numbers[1][i]
    return [d for d in range(rank) if d not in contracting and d not in batch]


def transposed(
    numbers: DimensionNumbers, ranks: Sequence[int], i: int
) -> tuple[DimensionNumbers, tuple[int, ...]]:
    """Returns the product that computes the cotangent of operand ``i``.

    Args:
        numbers: The dimension numbers of the product.
        ranks: The ranks of the operands.
        i: The position of the operand, 0 or 1.

    Returns:
        The dimension numbers of a product whose operand ``i`` is the cotangent of the result; and
        the permutation that brings its result to the order of the operand's dimensions. For ``x @
        w`` the permutation is the identity, so that XLA finds the scale right after the product.

    Example:
        >>> transposed((((1,), (0,)), ((), ())), (2, 2), 1)
        ((((0,), (0,)), ((), ())), (0, 1))
    """
    j = 1 - i
    mine, theirs = free(numbers, ranks[i], i), free(numbers, ranks[j], j)
    batch = tuple(range(len(numbers[1][i])))
    # A product's result has the batch dimensions first, then the free dimensions of both operands.
    first = len(batch) + (len(mine) if i == 0 else 0)
    contracted = tuple(range(first, first + len(theirs)))
    other, other_batch = tuple(theirs), tuple(numbers[1][j])
    by_other = [numbers[0][i][k] for k in np.argsort(numbers[0][j])]
    if i == 0:
        new, order = ((contracted, other), (batch, other_batch)), [*mine, *by_other]
    else:
        new, order = ((other, contracted), (other_batch, batch)), [*by_other, *mine]
    return new, tuple(int(d) for d in np.argsort([*numbers[1][i], *order]))


def batched(
    numbers: DimensionNumbers, ranks: Sequence[int], mapped: Sequence[bool]
) -> tuple[DimensionNumbers, int]:
    """Returns the dimension numbers under `vmap`, and the new dimension's position in the result.

    Args:
        numbers: The dimension numbers for one example.
        ranks: The ranks of the operands for one example.
        mapped: Whether each operand has the new dimension, in front.

    Example:
        >>> batched((((1,), (0,)), ((), ())), (2, 2), (True, False))
        ((((2,), (0,)), ((), ())), 0)
        >>> batched((((1,), (0,)), ((), ())), (2, 2), (True, True))
        ((((2,), (1,)), ((0,), (0,))), 0)
    """
    contracting, batch = (
        [tuple(d + mapped[i] for d in dims[i]) for i in (0, 1)] for dims in numbers
    )
    at = 0
    if all(mapped):
        batch = [(0, *dims) for dims in batch]
    elif mapped[0]:
        at = len(batch[0])
    else:
        at = len(batch[0]) + len(free(numbers, ranks[0], 0))
    return ((contracting[0], contracting[1]), (batch[0], batch[1])), at


def kept(scale: Any, numbers: DimensionNumbers, ranks: Sequence[int], i: int) -> Any:
    """Returns the scale of operand ``i``, reshaped to multiply the result of the product.

    The scale is a scalar, or an array with length 1 along the contracted dimensions.
    """
    if not scale.ndim:
        return scale
    batch, rest = list(numbers[1][i]), free(numbers, ranks[i], i)
    shape = [scale.shape[d] for d in (*batch, *rest)]
    ones = [1] * len(free(numbers, ranks[1 - i], 1 - i))
    at = len(batch) if i == 1 else len(shape)
    moved = scale.transpose((*batch, *rest, *numbers[0][i]))
    return moved.reshape(*shape[:at], *ones, *shape[at:])


def met(scale: Any, numbers: DimensionNumbers, ranks: Sequence[int], i: int) -> Any:
    """Returns the scale of operand ``i``, reshaped to multiply the other operand.

    The scale is an array with length 1 along the free dimensions of operand ``i``.

    Example:
        >>> import jax.numpy as jnp
        >>> met(jnp.ones((4, 1)), (((0,), (1,)), ((), ())), (2, 2), 0).shape
        (1, 4)
    """
    at = dict(zip(numbers[0][1 - i], numbers[0][i], strict=True))
    at |= zip(numbers[1][1 - i], numbers[1][i], strict=True)
    order = [at[d] for d in sorted(at)]
    moved = scale.transpose((*order, *free(numbers, ranks[i], i)))
    shape = [scale.shape[at[d]] if d in at else 1 for d in range(ranks[1 - i])]
    return moved.reshape(shape)
