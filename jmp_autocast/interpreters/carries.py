"""Which carries of a loop may run in 16 bits, and which of them accumulate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..policies import CALLS, CONTRACTIONS, FLOAT32
from .compat import Literal, body_of, inner_jaxpr_key
from .plan import CUSTOM_RULES, Leaf, ValueState, float_dtype
from .votes import literal_guard

# What comes out of these does not grow with what went in, so an error in it does not add up.
_BOUNDED = frozenset("tanh logistic sin cos erf erfc sqrt cbrt".split())


def first_guess(
    variables: Sequence[Any],
    initial: Sequence[ValueState],
    accumulating: frozenset[int],
    low: np.dtype | None,
    data_abstains: bool,
) -> list[np.dtype | None]:
    """Returns the dtype that each carry may have at best; planning the body can only raise it.

    A carry starts in 16 bits if its initial value is computed there, or is a leaf without a vote,
    such as zeros. One that accumulates over the iterations stays float32: over 2,048 steps a
    16-bit sum loses three quarters of its value.

    Args:
        variables: The carries, as the body's inputs.
        initial: What is known of each initial value.
        accumulating: The carries that accumulate.
        low: The compute dtype, None where nothing is lowered.
        data_abstains: The program's inputs have no vote.
    """
    voters = (None,) if data_abstains else (None, Leaf.DATA)

    def guess(k: int, declared: np.dtype | None, state: ValueState) -> np.dtype | None:
        if low is None or declared != FLOAT32 or k in accumulating:
            return declared
        if literal_guard([state], [0], low) is not None:
            return declared
        return low if state.dtype == low or state.leaf not in voters else declared

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
    """Returns the dtypes in which each carry enters the body as it leaves it.

    Args:
        carries: The first guess.
        declared: The dtypes that the program declares.
        initial: What is known of each initial value.
        returned_by_body: Plans the body for given carries and says what it returns.
    """
    while carries != declared:
        states = zip(returned_by_body(carries), initial, carries, strict=True)
        returned = [None if _takes(s, i, d) else s.dtype for s, i, d in states]
        joined = [
            e if r not in (None, d) else d
            for d, e, r in zip(carries, declared, returned, strict=True)
        ]
        if joined == carries:
            break
        carries = joined
    return carries


def _takes(state: ValueState, initial: ValueState, dtype: np.dtype | None) -> bool:
    """A leaf, such as zeros again, takes any dtype that has its value.

    Arguments alone take none: where nothing is computed, nothing is rounded.
    """
    if state.leaf in (None, Leaf.DATA) or dtype is None:
        return False
    if state.leaf is Leaf.PARAM and initial.leaf is not None:
        return False
    return dtype == FLOAT32 or literal_guard([state], [0], dtype) is None


def accumulating_carries(body: Any, first: int, count: int) -> frozenset[int]:
    """Returns the carries that come back to themselves through sums, products and the like.

    A path through a matmul, a convolution or a bounded function does not count.

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
        # Carries may swap places: follow the paths over several iterations.
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
        name = eqn.primitive.name
        if name in CONTRACTIONS or name in _BOUNDED or not any(operands):
            continue
        if name in CALLS or name in CUSTOM_RULES:
            inner = _cheap_sources(body_of(eqn.params[inner_jaxpr_key(eqn.params)]))
            results = [frozenset().union(*(operands[i] for i in found)) for found in inner]
        else:
            results = [frozenset().union(*operands)] * len(eqn.outvars)
        sources.update(zip(eqn.outvars, results, strict=True))
    return of(body.outvars)
