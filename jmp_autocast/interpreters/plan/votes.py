"""Decides which operands set the dtype of a promoting equation, and which literals forbid 16 bits.

A float32 sum of activations that were 16-bit before is rounded once (`rounded_stream`). An example
is the sum in a residual network, after a norm of a convolution. The norm computes in float32 on
values that the convolution has rounded by 2**-9. With ``dtype=`` by hand, and in PyTorch's batch
norm, the result of the norm is 16-bit, and so is the sum, which is kept for the backward pass. Here
the norm stays in float32, and the sum is rounded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from ...policies import FLOAT32
from ..compat import JaxprEqn, aval_of
from ..primitives.clamped_cast import clamped
from ..primitives.traits import having
from .avals import is_16_bit, is_as_large
from .basic_plans import rounded_once
from .constant_range import BOUND, NEAR
from .data import Context, EquationPlan, Inside, Reason, ReasonCode, Source, ValueState
from .marks import Marks, is_stream
from .needs import HARMED, Need

SHIFTS = having("shifts")
_SUMS = having("sums")
_CHOOSES = having("chooses")
_CLIPS = _CHOOSES & having("rounds")  # max, min, clamp: the result is one of the operands
_STARTS = having("affine") - (SHIFTS - _SUMS)
# A summand of order one keeps no digit beside a literal of this size, even in float32.
_BEYOND_FLOAT32 = 2.0**24
_COMBINES = having("replicates") | having("contracts")
_SUM = Reason(ReasonCode.PROMOTE_LOW, "all summands were rounded before")


def voters(ctx: Context) -> list[int]:
    """Returns the operands whose dtypes decide the dtype of an equation that promotes.

    A computed value votes. A source votes if its rounding may cost more than 2**-9 of the result,
    which depends on the primitive:

    * The rounding of a factor costs as much as that of the result. Data votes, as PyTorch's float32
      tensors do, but only if it has the size of the result: the vote of a norm's scale, or of
      RoPE's table, would raise a whole activation.
    * The rounding of a summand costs 2**-9 of the summand, which may be all of the result, as in
      ``position + offset`` or in ``weight - rate * gradient``. A source votes unless
      `summand_votes` finds an exception.
    * A maximum returns an operand, and a comparison returns a bool. Data votes in both, and a
      parameter or constant votes in a comparison.

    Args:
        ctx: The equation.

    Returns:
        The positions of the operands that vote.
    """
    computed = [i for i in ctx.floats if ctx.given[i].source is None]
    if ctx.policy.data_abstains:
        return computed
    return [i for i in ctx.floats if i in computed or _votes(ctx, i, bool(computed))]


def _votes(ctx: Context, i: int, beside: bool) -> bool:
    """Whether a source votes; ``beside`` a computed value, or in a function of sources alone."""
    state, is_data = ctx.given[i], ctx.given[i].source is Source.DATA
    if is_harmless(state):
        return False
    if beside and ctx.name in SHIFTS:
        # Data votes, as it may be much larger than the other operand: `position + offset`.
        is_parameter = state.source is Source.PARAM
        return is_data or summand_votes(ctx.eqn, ctx.marks, i, is_parameter)
    if beside and ctx.name in _CHOOSES:
        # A parameter votes in a comparison, but not in a clip, which is as exact as its bounds.
        return is_data or ctx.name not in _CLIPS
    # `select_n` and `concatenate` do not broadcast: no operand is a small row.
    if not is_data or ctx.name not in _COMBINES:
        return is_data
    return all(is_as_large(ctx.eqn.invars[i], v) for v in (*ctx.eqn.outvars, *ctx.eqn.invars))


def summand_votes(eqn: JaxprEqn, marks: Sequence[Marks], i: int, is_parameter: bool) -> bool:
    """Returns whether a parameter or constant votes on a sum: it does, unless it is a bias.

    Args:
        eqn: A sum or difference of the parameter or constant and a computed value.
        marks: The marks of its operands.
        i: The position of the parameter or constant.
        is_parameter: It is a parameter.
    """
    fresh = marks[1 - i].fresh
    # A difference from a value that no product computes needs digits, such as `x - mean` of an
    # input.
    if eqn.primitive.name not in _SUMS and fresh == 0:
        return True
    if marks[i].spread or not is_as_large(eqn.invars[i], eqn.outvars[0]):
        # A row of parameters (`h @ w + b`) has no vote, and a row of constants has none beside a
        # product.
        return not is_parameter and fresh == 0
    # In `h @ w + b` for a single example, a bias has the size of the product, and has no vote. In
    # `addmm` and `w + a @ b` a matrix is added, and votes: float32 costs one fused temporary there,
    # and 16 bits would round the weight.
    return aval_of(eqn.outvars[0]).ndim != 1 or fresh < 2


def is_harmless(state: ValueState) -> bool:
    """Returns whether a source has one known value, `may_be_rounded`, or is within [-1, 1]."""
    is_small = state.const_range is not None and state.const_range.found.is_within_one
    return state.known_value is not None or state.may_be_rounded or is_small


def starts_stream(ctx: Context) -> bool:
    """Returns whether rows of parameters, as of an embedding, are summed, scaled or joined.

    Differences, and sums with data, do not count: for an input ``x``, `x - centers[nearest]` is a
    small difference, which is exact in float32.

    Args:
        ctx: The equation, whose operands are all sources.
    """
    others = [ctx.given[i].source for i in ctx.floats if not ctx.given[i].is_looked_up]
    return ctx.name in _STARTS and len(others) < len(ctx.floats) and Source.DATA not in others


@functools.lru_cache(4096)
def representable(value: float, dtype: np.dtype) -> bool:
    """Returns whether a literal keeps its meaning in ``dtype``: it becomes no inf, 0, 1 or -1.

    In float16 a mask of -1e9 becomes -inf, and a masked row NaN; ``1e-8`` becomes 0; ``1 - 1e-7``
    becomes 1, and its logarithm 0. In bfloat16 nothing finite becomes infinite:
    ``finfo(float32).min`` is clamped to the lowest bfloat16 number, an error of 2**-8, no more than
    that of other numbers (`clamped`).

    Args:
        value: The value of every element of the literal.
        dtype: A compute dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> representable(1e-8, jnp.dtype("float16")), representable(1e-8, jnp.dtype("bfloat16"))
        (False, True)
    """
    # An infinity or a NaN in the program is the same in every dtype.
    if not math.isfinite(value):
        return True
    rounded = float(clamped(value, dtype))
    return math.isfinite(rounded) and not (rounded in (0.0, 1.0, -1.0) and rounded != value)


def literal_guard(given: Sequence[ValueState], compute_dtype: np.dtype) -> Reason | None:
    """Returns the reason why a literal or constant forbids the compute dtype, None without one.

    Args:
        given: The state of each operand.
        compute_dtype: float16 or bfloat16.
    """
    # Operands that do not vote are checked as well: -1e9 of a mask is -inf in float16, and a row
    # that is masked throughout becomes NaN in the softmax after it.
    for i, state in enumerate(given):
        value, const_range = state.dtype and state.known_value, state.const_range
        if value is not None and not representable(value, compute_dtype):
            cause = f"{value:g} has no {compute_dtype.name} value"
            return Reason(ReasonCode.LITERAL, cause, (i,))
        if const_range is not None and compute_dtype in const_range.found.exceeds:
            cause = f"operand {i} exceeds the range of {compute_dtype.name}"
            return Reason(ReasonCode.LITERAL, cause, (i,))
    return None


def far_literal(name: str, given: Sequence[ValueState], compute_dtype: np.dtype) -> Reason | None:
    """Returns the reason why a literal takes the digits of a 16-bit operand, None without one.

    A sum is rounded to 2**-9 of the larger summand: in bfloat16 ``x + 1000`` is a multiple of 4,
    and ``(x + 1000) - 1000`` has lost ``x``. A choice returns the literal: 10,000 is 9,984 in
    bfloat16, and its difference to 10,000 is -16 and not 0.

    Args:
        name: The name of the primitive.
        given: The state of each operand.
        compute_dtype: float16 or bfloat16.
    """
    for i, state in enumerate(given if name in SHIFTS | _CLIPS | {"select_n"} else ()):
        value, constant = state.dtype and state.known_value, state.const_range
        if name in SHIFTS:
            takes = value is not None and NEAR < abs(value) < _BEYOND_FLOAT32
        elif value is None:
            takes = constant is not None and compute_dtype in constant.found.rounds
        else:
            # A negative number in `select_n` is taken for a mask, which may be rounded. In a clip,
            # a negative number is a bound, which may not be rounded.
            bound = abs(value) if name in _CLIPS else value
            takes = NEAR < bound <= BOUND and float(clamped(value, compute_dtype)) != value
        if takes:
            what = f"operand {i}" if value is None else f"{value:g}"
            cause = f"{what} takes digits of what it meets in {compute_dtype.name}"
            return Reason(ReasonCode.LITERAL, cause, (i,))
    return None


def rounded_stream(ctx: Context, plan: EquationPlan) -> EquationPlan:
    """Rounds the result of a stream, and marks other results of rounded operands `was_rounded`.

    A sum is a stream if a product reads it through elementwise operations. A sum that only a loss
    or a mean reads keeps float32, and so does a sum that becomes an integer, or reaches a logarithm
    or a denominator.

    Args:
        ctx: The equation.
        plan: Its plan so far.
    """
    # At level "tensor_cores" only contractions round.
    is_lowered = ctx.region.compute_dtype is not None and ctx.policy.level != "tensor_cores"
    if not is_lowered or isinstance(plan.action, Inside) or not _was_rounded(ctx, plan):
        return plan
    if not (ctx.policy.data_abstains or _promotes_computed(ctx, plan)):
        return plan
    read_low = bool(ctx.need & Need.LEADS) and not ctx.need & HARMED
    sums = is_stream(ctx.eqn, ctx.marks, ctx.policy.data_abstains)
    is_summed = sums and all([state.is_computed for state in ctx.given])
    if read_low and is_summed and plan.reason.code is ReasonCode.PROMOTE_FULL:
        return rounded_once(dataclasses.replace(plan, reason=_SUM), ctx.compute_dtype)
    marked = dataclasses.replace(plan.results[0], was_rounded=True)
    return dataclasses.replace(plan, results=(marked,))


def _promotes_computed(ctx: Context, plan: EquationPlan) -> bool:
    """Whether an equation is float32 only because of its computed operands, as in PyTorch.

    The answer is no if PyTorch computes the op in float32 (an exponential), if a guard decides
    (``h + 10000``), or if a position or another source votes: such a result has digits that 16 bits
    lack. At level "compute", `rounded_stream` skips this check, as with ``dtype=`` by hand.
    """
    computed = all(ctx.given[i].source is None for i in voters(ctx))
    is_promoted = plan.reason.code is ReasonCode.PROMOTE_FULL and computed
    return is_promoted and far_literal(ctx.name, ctx.given, ctx.compute_dtype) is None


def _was_rounded(ctx: Context, plan: EquationPlan) -> bool:
    """Whether the result is float32, and each computed operand of its size was 16-bit before."""
    if [state.dtype for state in plan.results] != [FLOAT32]:
        return False
    shape = aval_of(ctx.eqn.outvars[0]).shape
    pairs = zip(ctx.eqn.invars, ctx.given, strict=True)
    found = [s for v, s in pairs if s.is_computed and aval_of(v).shape == shape]
    return bool(found) and all(s.was_rounded or is_16_bit(s.dtype) for s in found)
