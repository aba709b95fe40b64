"""What goes into a body: casts that are made before a call, and copies that a loop takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..primitives.float8_scale import CopyKey, ScaleOf, in_8_bits
from ..primitives.structure import Body, has_rule, is_plain_call, runs_again
from .data import Demand, Plan, Source, ValueState
from .float_dtypes import is_in, is_narrower
from .region import Place


def read_low(
    inner: Plan, at: Place, sources: Sequence[Source | None] = (None,)
) -> list[np.dtype | None]:
    """Returns the casts of float32 operands, of given kinds, that a body reads in 16 bits alone.

    Before a call, a cast is shared with other readers, and what the call keeps for the backward
    pass is half as large. Before a loop, it is done once.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        at: The equation.
        sources: The kinds of the operands that may be cast; None is a computed value.
    """

    # A known value is cast at trace time, and a source reads through a view of its own.
    def is_cast(state: ValueState, demand: Demand) -> bool:
        may_be = state.source in sources and state.known_value is None
        return may_be and demand is Demand.LOW and is_in(state.dtype, at.wide)

    pairs = zip(at.given, inner.demands, strict=True)
    return [at.region.compute_dtype if is_cast(*pair) else None for pair in pairs]


def read_full(inner: Plan, at: Place) -> list[np.dtype | None]:
    """Returns the casts of 16-bit operands that a call, and others, read in float32 alone.

    Before the call, the cast is shared with the other readers, whose cotangents are added up in
    float32: a batch norm subtracts the mean of what `jnp.var` reads, and the two cotangents nearly
    cancel. Rounded before they were added, the gradient of the layer before was 2.5 % off in
    bfloat16, and is 0.17 %.

    Args:
        inner: The plan of the body, whose inputs are the operands.
        at: The equation.
    """
    # What is computed again is kept in 16 bits; what goes to other devices or to the host goes so.
    if not (is_plain_call(at.eqn) or has_rule(at.eqn)):
        return [None] * len(at.given)

    def is_cast(state: ValueState, demand: Demand) -> bool:
        may_be = state.is_computed and state.known_value is None and state.is_widened
        return may_be and demand is Demand.FULL and is_narrower(state.dtype, at.wide)

    pairs = zip(at.given, inner.demands, strict=True)
    return [at.wide if is_cast(*pair) else None for pair in pairs]


def cast_states(
    given: Sequence[ValueState],
    operands: Sequence[np.dtype | None],
    wide: np.dtype,
    finds_torch_dtypes: bool = False,
) -> list[ValueState]:
    """Returns what is known of operands after they are cast.

    Args:
        given: What is known of them before.
        operands: The dtype that each is cast to, None for none.
        wide: The wide dtype of the policy.
        finds_torch_dtypes: What PyTorch would not have cast remembers its dtype.
    """

    def after(state: ValueState, dtype: np.dtype | None) -> ValueState:
        if dtype is None:
            return state
        was_rounded = dtype == wide and is_narrower(state.dtype, wide)
        own = state.torch_dtype or state.dtype if finds_torch_dtypes and was_rounded else None
        return ValueState(
            dtype,
            freshness=state.freshness,
            was_rounded=was_rounded,
            torch_dtype=own,
            marks=state.marks,
        )

    return list(map(after, given, operands))


def invariant_copies(at: Place, inner: Plan, body: Body) -> list[tuple[int, CopyKey]]:
    """Returns the copies of sources that a call takes from outside.

    Those in 16 bits inside a loop alone. Elsewhere the cast stays inside: a copy handed to
    ``jax.checkpoint`` would be kept for the backward pass. So would one in 8 bits: for a scanned
    MLP the temporaries on an H100 were 1.18 times those of bfloat16, and with 2,048 tokens 1.56
    times. Its scale is kept instead, so that the weight is searched for its largest element once.
    """

    def is_handed_in(state: ValueState, key: CopyKey) -> bool:
        if state.loop_invariant or not in_8_bits(key):
            return state.loop_invariant
        is_kept = runs_again(at.eqn) and state.scales is None
        return isinstance(key, ScaleOf) or not is_kept

    pairs = [(body.operands[i], d) for i, d in inner.source_copies]
    return [(i, d) for i, d in pairs if is_handed_in(at.given[i], d)]
