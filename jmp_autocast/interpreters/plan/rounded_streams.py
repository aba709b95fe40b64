"""A float32 sum of activations that were 16 bits before is rounded, but only once.

A norm after a convolution computes in float32 on values that have lost 2**-9 in the convolution.
With ``dtype=`` by hand, and in PyTorch's batch norm, its result is 16 bits, and so is the sum of a
residual network, which is a residual of the backward pass. Here the sum is computed in float32 and
rounded once.
"""

from __future__ import annotations

import dataclasses

from ...policies import FLOAT32
from ..compat import aval_of
from .basic_plans import rounded_once
from .data import Context, EquationPlan, Inside
from .float_dtypes import is_16_bit
from .needs import HARMED, Need
from .reasons import Reason, ReasonCode
from .votes import far_literal, is_stream, voters

_SUM = Reason(ReasonCode.PROMOTE_LOW, "all summands were rounded before")


def rounded_stream(ctx: Context, plan: EquationPlan) -> EquationPlan:
    """Returns the plan of an equation, rounded if it is a stream, or marked as rounded before.

    A sum is a stream if a product reads it through elementwise operations. One that only a
    loss or a mean reads keeps float32, and so does one that becomes an integer, or reaches a
    logarithm or a denominator.

    Args:
        ctx: The equation.
        plan: Its plan so far.
    """
    # At level "tensor_cores" nothing but contractions rounds.
    if ctx.region.compute_dtype is None or ctx.policy.level == "tensor_cores":
        return plan
    if isinstance(plan.action, Inside) or not _was_rounded(ctx, plan):
        return plan
    if not (ctx.policy.data_abstains or _promotes_computed(ctx, plan)):
        return plan
    read_low = bool(ctx.need & Need.LEADS) and not ctx.need & HARMED
    is_summed = is_stream(ctx) and all([state.is_computed for state in ctx.given])
    if read_low and is_summed and plan.reason.code is ReasonCode.PROMOTE_FULL:
        return rounded_once(plan, ctx.compute_dtype, _SUM)
    return dataclasses.replace(
        plan, results=(dataclasses.replace(plan.results[0], was_rounded=True),)
    )


def _promotes_computed(ctx: Context, plan: EquationPlan) -> bool:
    """Whether computed operands alone make an equation float32, as in PyTorch.

    Ops that PyTorch computes in float32 (an exponential), results of guards (``h + 10000``), and
    sums with a position or another source have digits of their own. At level "compute" none of this
    counts, as with ``dtype=`` by hand.
    """
    if plan.reason.code is not ReasonCode.PROMOTE_FULL:
        return False
    if any(ctx.given[i].source is not None for i in voters(ctx)):
        return False
    return far_literal(ctx, ctx.compute_dtype) is None


def _was_rounded(ctx: Context, plan: EquationPlan) -> bool:
    """Whether the float32 result is made element by element of values that were 16 bits before."""
    if len(plan.results) != 1 or plan.results[0].dtype != FLOAT32:
        return False
    shape = aval_of(ctx.eqn.outvars[0]).shape
    pairs = zip(ctx.eqn.invars, ctx.given, strict=True)
    found = [
        s.was_rounded or is_16_bit(s.dtype)
        for v, s in pairs
        if s.is_computed and aval_of(v).shape == shape
    ]
    return bool(found) and all(found)
