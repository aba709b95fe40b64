"""Dimension numbers of matrix products: of their transposes, under a batch, and for scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

DimensionNumbers: TypeAlias = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]
"""Contracted dimensions of both operands, then those of the batch, as in ``lax.dot_general``."""


def free(numbers: DimensionNumbers, rank: int, i: int) -> list[int]:
    """Returns the dimensions of operand ``i`` that are neither contracted nor of the batch.

    Example:
        >>> free((((1,), (0,)), ((), ())), 2, 0)
        [0]
    """
    contracting, batch = numbers[0][i], numbers[1][i]
    return [d for d in range(rank) if d not in contracting and d not in batch]


def uncontracted(numbers: DimensionNumbers, rank: int, i: int) -> tuple[int, ...]:
    """Returns the dimensions of operand ``i`` that the product does not sum over, in their order.

    Example:
        >>> uncontracted((((2,), (1,)), ((0,), (0,))), 3, 1)
        (0, 2)
    """
    return tuple(d for d in range(rank) if d not in numbers[0][i])


def transposed(
    numbers: DimensionNumbers, ranks: Sequence[int], i: int
) -> tuple[DimensionNumbers, tuple[int, ...]]:
    """Returns the product of a cotangent and the other operand that is the cotangent of one.

    Args:
        numbers: The dimension numbers of the product.
        ranks: The ranks of its operands.
        i: The operand whose cotangent is asked for.

    Returns:
        The dimension numbers of a product of the cotangent, which stands where the operand stood,
        and the other operand, and the permutation that brings its result to the order of the
        operand: none for ``x @ w``, so that a scale that follows is found by XLA.

    Example:
        >>> transposed((((1,), (0,)), ((), ())), (2, 2), 1)
        ((((0,), (0,)), ((), ())), (0, 1))
    """
    j = 1 - i
    mine, theirs = free(numbers, ranks[i], i), free(numbers, ranks[j], j)
    batch = tuple(range(len(numbers[1][i])))
    # The result of a product has the batch first, then what is free on the left, then the right.
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
    """Returns the product of operands some of which have the dimension of a batch in front.

    Args:
        numbers: The dimension numbers for one example.
        ranks: The ranks of the operands for one example.
        mapped: Which operands have the dimension.

    Returns:
        The dimension numbers, and the position of the batch in the result.

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
    """Returns the scale of an operand in the shape in which it multiplies the result.

    Args:
        scale: A scalar, or an array that broadcasts against the operand, with length 1 along the
            contracted dimensions.
        numbers: The dimension numbers of the product.
        ranks: The ranks of its operands.
        i: The operand.
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
    """Returns the scale of an operand in the shape in which it multiplies the other one.

    Args:
        scale: An array of the operand's rank, with length 1 along its free dimensions.
        numbers: The dimension numbers of the product.
        ranks: The ranks of its operands.
        i: The operand.

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
