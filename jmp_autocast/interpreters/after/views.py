"""Which computed values are read in 16 bits so often that their gradient needs float32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..compat import Atom, Literal
from ..plan.data import Plan, ValueState
from ..plan.float_dtypes import is_narrower

# Added up in bfloat16, seven cotangents lose no more than 7 / 2 units of 2**-9; 513 lost a third of
# the gradient of a normalized weight.
_MOST = 7

# What autocast has made of an earlier reading: its gradient goes to the source, not to the copy.
_REWRITTEN = frozenset(("source_view", "accumulate"))


def read_often(plan: Plan) -> frozenset[Any]:
    """Returns the values of a jaxpr that are to be read as sources are: through views.

    A normalized weight, or a merged one, is computed once and read in each step of an unrolled
    loop; so is an encoding, a product in 16 bits, by each step of a decoder. Each read is then a
    view of the one 16-bit array, whose cotangent is widened before it is added to the others. That
    costs no kept byte: a view holds nothing.

    Args:
        plan: The plan of the jaxpr.
    """
    reads: Counter[Any] = Counter()
    widened: set[Any] = set()
    made: dict[Any, ValueState] = {}

    def read(v: Atom, dtype: np.dtype | None) -> None:
        # Neither inputs nor literals count, nor what moves a source.
        state = None if isinstance(v, Literal) else made.get(v)
        if state is None or state.source is not None:
            return
        if is_narrower(dtype or state.dtype, plan.wide):
            reads[v] += 1
        elif is_narrower(state.dtype, plan.wide):
            widened.add(v)

    for eqn, equation in zip(plan.jaxpr.eqns, plan.equations, strict=True):
        made.update(zip(eqn.outvars, equation.results, strict=True))
        if eqn.primitive.name not in _REWRITTEN:
            for v, dtype in zip(eqn.invars, equation.operands, strict=True):
                read(v, dtype)
    for v, dtype in zip(plan.jaxpr.outvars, plan.output_dtypes, strict=True):
        read(v, dtype)
    # All that read a value in float32 share one cast, which has one cotangent.
    reads.update(widened)
    return frozenset(v for v, count in reads.items() if count > _MOST)
