"""Which carries of a loop may run in 16 bits, and which of them accumulate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...policies import FLOAT32
from ..compat import Literal, body_of
from ..primitives.structure import called, is_call
from ..primitives.traits import having
from .data import Source, ValueState, float_dtype
from .votes import literal_guard

_BOUNDED = having("bounded") | having("contracts")


def first_guess(
    variables: Sequence[Any],
    initial: Sequence[ValueState],
    accumulating: frozenset[int],
    compute_dtype: np.dtype | None,
    data_abstains: bool,
) -> list[np.dtype | None]:
    """Returns the dtype that each carry may have at best; planning the body can only raise it.

    A carry starts in 16 bits if its initial value is computed there, or is a source without a vote,
    such as zeros. One that accumulates over the iterations stays float32: over 2,048 steps a
    16-bit sum loses three quarters of its value.

    Args:
        variables: The carries, as the body's inputs.
        initial: What is known of each initial value.
        accumulating: The indices of the carries that accumulate.
        compute_dtype: The compute dtype, None where nothing is lowered.
        data_abstains: The program's inputs have no vote.
    """
    voting = (None,) if data_abstains else (None, Source.DATA)

    def guess(k: int, declared: np.dtype | None, state: ValueState) -> np.dtype | None:
        if compute_dtype is None or declared != FLOAT32 or k in accumulating:
            return declared
        # A running maximum starts at finfo(float32).min, which 16 bits turn into -inf, and exp(-inf
        # + inf) into NaN.
        if literal_guard([state], [0], compute_dtype) is not None:
            return declared
        votes_full = state.dtype != compute_dtype and state.source in voting
        return declared if votes_full else compute_dtype

    return [
        guess(k, float_dtype(v.aval), state)
        for k, (v, state) in enumerate(zip(variables, initial, strict=True))
    ]


def settled(
    carries: list[np.dtype | None],
    declared: Sequence[np.dtype | None],
    initial: Sequence[ValueState],
    returned_by_body: Callable[[Sequence[np.dtype | None]], Sequence[ValueState]],
) -> list[np.dtype | None]:
    """Returns the dtypes with which the body returns each carry in the dtype that it took.

    This ends: each round returns at least one more carry to its declared dtype, for good.

    Args:
        carries: The first guess.
        declared: The dtypes that the program declares.
        initial: What is known of each initial value.
        returned_by_body: Plans the body for given carries and says what it returns.
    """
    while carries != declared:
        states = zip(returned_by_body(carries), initial, carries, strict=True)
        returned = [None if _can_be(d, s, i) else s.dtype for s, i, d in states]
        joined = [
            e if r not in (None, d) else d
            for d, e, r in zip(carries, declared, returned, strict=True)
        ]
        if joined == carries:
            break
        carries = joined
    return carries


def _can_be(dtype: np.dtype | None, returned: ValueState, initial: ValueState) -> bool:
    """Returns whether a carry can be cast to a dtype, although its body returns another.

    A source that the body returns, such as zeros that reset a state, can be cast if the dtype holds
    its value. Data cannot: it is what the next iteration computes with. A parameter can only where
    something is computed; a loop that hands an argument on shall not round it.

    Args:
        dtype: The dtype.
        returned: What the body returns.
        initial: What the carry starts as.
    """
    if returned.source in (None, Source.DATA) or dtype is None:
        return False
    if returned.source is Source.PARAM and initial.source is not None:
        return False
    return dtype == FLOAT32 or literal_guard([returned], [0], dtype) is None


def accumulating_carries(body: Any, first: int, count: int) -> frozenset[int]:
    """Returns the carries that come back to themselves through sums, products and the like.

    A path through a matmul, a convolution or a bounded function does not count: what comes out of a
    ``tanh`` does not grow with what went in, so an error in it does not add up.

    Args:
        body: The loop's body.
        first: The input that is its first carry. The carries are the first outputs.
        count: The number of carries.
    """
    sources = [
        [i - first for i in found if first <= i < first + count]
        for found in _cheap_sources(body)[:count]
    ]

    def returns_to(k: int) -> bool:
        # A carry that reaches itself adds up the rounding of each step, like a running mean; one
        # that goes through a matmul is a new value each time, like the state of an RNN. Carries may
        # swap places: follow the paths over several iterations.
        pending, seen = list(sources[k]), set()
        while pending and k not in seen:
            if (i := pending.pop()) not in seen:
                seen.add(i)
                pending += sources[i]
        return k in seen

    return frozenset(k for k in range(count) if returns_to(k))


def _cheap_sources(body: Any) -> list[frozenset[int]]:
    """For each output, the inputs that reach it with no matmul or bounded function between."""
    sources: dict[Any, frozenset[int]] = {v: frozenset((i,)) for i, v in enumerate(body.invars)}

    def of(atoms: Iterable[Any]) -> list[frozenset[int]]:
        return [
            frozenset() if isinstance(v, Literal) else sources.get(v, frozenset()) for v in atoms
        ]

    for eqn in body.eqns:
        operands = of(eqn.invars)
        if eqn.primitive.name in _BOUNDED or not any(operands):
            continue
        # `jax.nn.relu` and `jnp.where` are calls: without a look inside, every output of theirs
        # would come from every input.
        if is_call(eqn):
            inner = _cheap_sources(body_of(called(eqn)))
            results = [frozenset().union(*(operands[i] for i in found)) for found in inner]
        else:
            results = [frozenset().union(*operands)] * len(eqn.outvars)
        sources.update(zip(eqn.outvars, results, strict=True))
    return of(body.outvars)
