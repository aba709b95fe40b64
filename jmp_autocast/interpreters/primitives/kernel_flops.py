"""The FLOPs of products in a kernel: its author's estimate, or a count over its own program."""

from __future__ import annotations

import math
from typing import Any

from ...policies import CONTRACTIONS
from ..compat import JAXPRS, AnyJaxpr, JaxprEqn, body_of
from .reading import flops

_KERNELS = frozenset(("pallas_call", "custom_partitioning", "composite", "core_map", "mpmd_map"))


def kernel_flops(eqn: JaxprEqn) -> int:
    """Returns the FLOPs of the products in a kernel, 0 if they are unknown.

    Args:
        eqn: The equation of a kernel that keeps its declared dtypes.
    """
    estimate = getattr(eqn.params.get("cost_estimate"), "flops", None)
    if estimate:
        return int(estimate)
    held: Any = next((eqn.params[k] for k in ("jaxpr", "call") if k in eqn.params), None)
    if eqn.primitive.name not in _KERNELS or not isinstance(held, JAXPRS):
        return 0
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    steps = math.prod(n for n in grid if isinstance(n, int))
    return steps * _products_in(held)


def _products_in(jaxpr: AnyJaxpr) -> int:
    total = 0
    for eqn in body_of(jaxpr).eqns:
        if eqn.primitive.name in CONTRACTIONS:
            total += flops(eqn)
        length = eqn.params.get("length", 1)
        for value in eqn.params.values():
            for held in value if isinstance(value, tuple) else (value,):
                if isinstance(held, JAXPRS):
                    total += (length if isinstance(length, int) else 1) * _products_in(held)
    return total
