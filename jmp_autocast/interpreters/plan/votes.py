"""Which operands set the dtype of a promoting equation, and which literals forbid 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..compat import aval_of
from ..primitives.traits import having
from .constant_range import BOUND, NEAR
from .data import Context, Source, ValueState
from .marks import is_convolved_sum
from .reasons import Reason, ReasonCode
from .symbolic_sizes import is_as_large
from .value_facts import clamped, representable

_CHOOSES = having("chooses")
_CLIPS = _CHOOSES & having("rounds")  # max, min, clamp: the result is one of the operands
_SHIFTS = having("shifts")
_SUMS = having("sums")
_STARTS = having("affine") - (_SHIFTS - _SUMS)
# The sum of this and a number of order one keeps no digit of the number in float32.
_BEYOND_FLOAT32 = 2.0**24
_COMBINES = having("replicates") | having("contracts")


def voters(ctx: Context) -> list[int]:
    """Returns the operands whose dtypes decide the dtype of an equation that promotes.

    A computed value votes. A source votes if its rounding may cost more than 2**-9 of the result,
    which depends on the primitive:

    * The rounding of a factor costs as much as that of the result. Data of the program votes as
      PyTorch's float32 tensors do, but only at the full size of the result: a norm's scale, or
      RoPE's table, would raise a whole activation. A divisor in float16 votes if it may have a
      gradient, which contains its inverse square: 0 from 4,096 on and infinite below 1/256.
    * A summand costs 2**-9 of itself, which is all of the result in ``position + offset`` or in
      ``weight - rate * gradient``. It votes unless `_summand_votes` finds an exception.
    * A maximum is one of its operands, and a comparison returns a bool: data votes, and so does the
      operand that it is compared with.

    Args:
        ctx: The equation.

    Returns:
        The positions of the operands that vote.
    """
    computed = [i for i in ctx.floats if ctx.given[i].source is None]
    if ctx.policy.data_abstains:
        return computed
    # A function of sources alone is a source itself: it stays float32 for its consumers.
    votes = (vote for names, vote in _CLASSES if computed and ctx.name in names)
    vote = next(votes, _factor_votes)
    return [i for i in ctx.floats if ctx.given[i].source is None or vote(ctx, i)]


def _factor_votes(ctx: Context, i: int) -> bool:
    if ctx.given[i].source is not Source.DATA:
        return False
    if ctx.name not in _COMBINES:
        # Without a broadcast (select_n, concatenate) all operands have the result's size.
        return True
    others = [*ctx.eqn.outvars, *(ctx.eqn.invars[k] for k in ctx.floats)]
    return all(is_as_large(ctx.eqn.invars[i], v) for v in others)


def _divisor_votes(ctx: Context, i: int) -> bool:
    has_gradient = ctx.given[i].known_value is None and ctx.given[i].source is not Source.CONST
    is_steep = ctx.compute_dtype == np.float16 and i == 1 and has_gradient
    return is_steep or _factor_votes(ctx, i)


def _summand_votes(ctx: Context, i: int) -> bool:
    """Whether a summand may be larger than the sum: a source that is no bias and not small."""
    state = ctx.given[i]
    if is_harmless(state):
        return False
    # Data may be much larger than the other operand: `pred - target`, `position + offset`.
    if state.source is Source.DATA:
        return True
    fresh = min((ctx.marks[k].fresh for k in ctx.floats if ctx.given[k].source is None), default=0)
    # `x - mean` with an input of the program. The mean of a product is a function of products.
    if ctx.name not in _SUMS and fresh == 0:
        return True
    if ctx.marks[i].spread or not is_as_large(ctx.eqn.invars[i], ctx.eqn.outvars[0]):
        # A row of parameters (`h @ w + b`) has no vote, and a row of constants has none beside a
        # product.
        return state.source is not Source.PARAM and fresh == 0
    # `h @ w + b` for a single example adds arrays of one size. `addmm` and `w + a @ b` are the same
    # program: float32 costs one fused temporary there, and 16 bits would round the weight.
    return aval_of(ctx.eqn.outvars[0]).ndim != 1 or fresh < 2


def _choice_votes(ctx: Context, i: int) -> bool:
    if is_harmless(ctx.given[i]):
        return False
    # A clip at a parameter is as exact as the parameter; a comparison with it is not.
    return ctx.given[i].source is Source.DATA or ctx.name not in _CLIPS


_CLASSES = ((_SHIFTS, _summand_votes), (_CHOOSES, _choice_votes), (having("div1"), _divisor_votes))
"""Whether a source votes beside computed operands: by primitive, `_factor_votes` for all others."""


def is_harmless(state: ValueState) -> bool:
    """Returns whether a source is known to be small, or exact, or one literal, as in PyTorch."""
    if state.known_value is not None or state.may_be_rounded:
        return True
    return state.const_range is not None and state.const_range.is_within_one()


def is_stream(ctx: Context) -> bool:
    """Returns whether a sum is in a residual stream that is 16 bits by intent.

    At level "compute" this is any sum of values of its own size that no parameter is among: a bias
    is smaller, and a parameter of full size, a learned position, is no stream. At other levels it
    is the stream of a convolutional network.

    Args:
        ctx: The equation.
    """
    if not ctx.policy.data_abstains:
        return is_convolved_sum(ctx.eqn, ctx.marks)
    shape = aval_of(ctx.eqn.outvars[0]).shape
    pairs = zip(ctx.eqn.invars, ctx.given, strict=True)
    sources = [s.source for v, s in pairs if aval_of(v).shape == shape]
    is_sum = ctx.name in _SUMS and len(sources) > 1
    return is_sum and all(source in (None, Source.DATA) for source in sources)


def starts_stream(ctx: Context) -> bool:
    """Returns whether rows of parameters are summed, scaled or joined: an embedding's, as a rule.

    Differences, and sums with data, do not count: `x - centers[nearest]` of the input of a program
    is a small difference, which is exact in float32.

    Args:
        ctx: The equation, whose operands are all sources.
    """
    operands = [ctx.given[i] for i in ctx.floats]
    others = [state.source for state in operands if not state.is_looked_up]
    return ctx.name in _STARTS and len(others) < len(operands) and Source.DATA not in others


def literal_guard(
    given: Sequence[ValueState], floats: Sequence[int], compute_dtype: np.dtype
) -> Reason | None:
    """Returns the literal or constant that changes its meaning in the compute dtype, or None.

    Args:
        given: The state of each operand.
        floats: The positions of the float operands.
        compute_dtype: float16 or bfloat16.
    """
    # Checked for each operand, also those that do not vote: -1e9 of a mask is -inf in float16, and
    # a row that is masked throughout becomes NaN in the softmax after it.
    for i in floats:
        value, const_range = given[i].known_value, given[i].const_range
        if value is not None and not representable(value, compute_dtype):
            cause = f"{value:g} has no {compute_dtype.name} value"
            return Reason(ReasonCode.LITERAL, cause, (i,))
        if const_range is not None and compute_dtype in const_range.exceeds():
            cause = f"operand {i} exceeds the range of {compute_dtype.name}"
            return Reason(ReasonCode.LITERAL, cause, (i,))
    return None


def far_literal(ctx: Context, compute_dtype: np.dtype) -> Reason | None:
    """Returns which literal takes the digits of the 16-bit value that it meets, None if none does.

    A sum is rounded to 2**-9 of the larger summand: in bfloat16 ``x + 1000`` is a multiple of 4,
    and ``(x + 1000) - 1000`` has lost ``x``. A choice returns the literal: 10,000 is 9,984 in
    bfloat16, and its difference to 10,000 is -16 and not 0.

    Args:
        ctx: The equation.
        compute_dtype: float16 or bfloat16.
    """
    chooses = ctx.name in _CLIPS or ctx.name == "select_n"
    for i in ctx.floats:
        value, const_range = ctx.given[i].known_value, ctx.given[i].const_range
        if value is None:
            takes = chooses and const_range is not None and compute_dtype in const_range.rounds()
        elif ctx.name in _SHIFTS:
            takes = NEAR < abs(value) < _BEYOND_FLOAT32
        else:
            # A negative number that `select_n` chooses is a mask; one that clips is a bound.
            lowest = NEAR if ctx.name == "select_n" else -BOUND
            is_inexact = float(clamped(value, compute_dtype)) != value
            takes = chooses and is_inexact and abs(value) > NEAR and lowest <= value <= BOUND
        if takes:
            what = f"operand {i}" if value is None else f"{value:g}"
            cause = f"{what} takes digits of what it meets in {compute_dtype.name}"
            return Reason(ReasonCode.LITERAL, cause, (i,))
    return None
