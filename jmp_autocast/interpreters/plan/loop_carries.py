"""Which carries of a loop may run in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..regions import Region
from .data import Source, ValueState
from .float_dtypes import is_in
from .votes import literal_guard


def first_guess(
    declared: Sequence[np.dtype | None],
    initial: Sequence[ValueState],
    accumulating: frozenset[int],
    region: Region,
    data_abstains: bool,
) -> list[np.dtype | None]:
    """Returns the dtype that each carry may have at best; planning the body can only raise it.

    A carry starts in 16 bits if its initial value is computed there, or is a source without a vote,
    such as zeros. One that accumulates over the iterations stays float32: over 2,048 steps a
    16-bit sum loses three quarters of its value.

    Args:
        declared: The dtypes that the program declares for the carries.
        initial: What is known of each initial value.
        accumulating: The indices of the carries that accumulate, and stay float32.
        region: The region of the loop.
        data_abstains: The program's inputs have no vote.
    """
    voting = (None,) if data_abstains else (None, Source.DATA)
    compute_dtype = region.compute_dtype

    def guess(k: int, declared: np.dtype | None, state: ValueState) -> np.dtype | None:
        if compute_dtype is None or not is_in(declared, region.wide) or k in accumulating:
            return declared
        # A running maximum starts at finfo(float32).min, which 16 bits turn into -inf, and exp(-inf
        # + inf) into NaN.
        if literal_guard([state], [0], compute_dtype) is not None:
            return declared
        votes_full = state.dtype != compute_dtype and state.source in voting
        return declared if votes_full else compute_dtype

    pairs = zip(declared, initial, strict=True)
    return [guess(k, dtype, state) for k, (dtype, state) in enumerate(pairs)]


def settled(
    carries: list[np.dtype | None],
    declared: Sequence[np.dtype | None],
    initial: Sequence[ValueState],
    returned_by_body: Callable[[Sequence[np.dtype | None]], Sequence[ValueState]],
    wide: np.dtype,
) -> list[np.dtype | None]:
    """Returns the dtypes with which the body returns each carry in the dtype that it took.

    This ends: each round returns at least one more carry to its declared dtype, for good.

    Args:
        carries: The first guess.
        declared: The dtypes that the program declares.
        initial: What is known of each initial value.
        returned_by_body: Plans the body for given carries and says what it returns.
        wide: The wide dtype of the policy.
    """
    while carries != declared:
        states = zip(returned_by_body(carries), initial, carries, strict=True)
        returned = [None if _can_be(d, s, i, wide) else s.dtype for s, i, d in states]
        joined = [
            d if is_in(r, None, d) else e
            for d, e, r in zip(carries, declared, returned, strict=True)
        ]
        if joined == carries:
            break
        carries = joined
    return carries


def _can_be(
    dtype: np.dtype | None, returned: ValueState, initial: ValueState, wide: np.dtype
) -> bool:
    """Returns whether a carry can be cast to a dtype, although its body returns another.

    A source that the body returns, such as zeros that reset a state, can be cast if the dtype holds
    its value. Data cannot: it is what the next iteration computes with. A parameter can only where
    something is computed; a loop that hands an argument on shall not round it.

    Args:
        dtype: The dtype.
        returned: What the body returns.
        initial: What the carry starts as.
        wide: The wide dtype of the policy.
    """
    if returned.source in (None, Source.DATA) or dtype is None:
        return False
    if returned.source is Source.PARAM and initial.source is not None:
        return False
    return dtype == wide or literal_guard([returned], [0], dtype) is None
