"""Which kernels keep float32, and whoever did not look is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import CONTRACTIONS
from ..compat import JaxprEqn, aval_of, is_array_aval, source_line
from ..plan.data import Plan
from ..plan.symbolic_sizes import at_least
from ..primitives.kernel_flops import kernel_flops
from ..primitives.reading import flops
from .guarded_products import LEAST_FLOPS, LEAST_SHARE, KeptWide
from .walk import Visit, equations_once, walk_plan


def is_wide_kernel(eqn: JaxprEqn, reads: Sequence[np.dtype | None], wide: np.dtype) -> bool:
    """Returns whether an equation is a kernel that multiplies operands of the wide dtype.

    Args:
        eqn: The equation.
        reads: The dtype in which it reads each operand.
        wide: The wide dtype of the policy.
    """
    is_wide = any(
        dtype == wide and is_array_aval(v.aval) and aval_of(v).dtype == wide
        for v, dtype in zip(eqn.invars, reads, strict=True)
    )
    return is_wide and kernel_flops(eqn) > 0


class WideKernels(KeptWide):
    """The kernels that keep float32."""

    def message(self, name: str, compute_dtype: Any) -> str:
        """Returns what to tell the user.

        Args:
            name: The name of the program.
            compute_dtype: The dtype of its other products.
        """
        return (
            f"autocast leaves {100 * self.share:.0f} % of the matmul FLOPs of {name} in kernels "
            f"that run in {self.wide}, first of all {self.largest.eqn.primitive.name} "
            f"({source_line(self.largest.eqn)}): a kernel keeps its dtypes. To run it with "
            f"{compute_dtype} operands name its function: policy.with_kernels('*name*'). If "
            f"{self.wide} is what you want, silence this by "
            'warnings.filterwarnings("ignore", message="autocast leaves").'
        )


def wide_kernels(plan: Plan) -> WideKernels | None:
    """Returns the kernels that keep float32, where they are worth a word.

    Args:
        plan: The plan of a whole program.

    Returns:
        None where they are less than 1 % of the FLOPs of products, or less than a million.
    """
    if not any(kernel_flops(eqn) > 0 for _, eqn, _ in equations_once(plan)):
        return None  # without a walk, which goes into each call of one function
    found = kernels_in(walk_plan(plan), plan.wide)
    if found is None or not at_least(found.flops, LEAST_FLOPS):
        return None
    return found if at_least(found.share, LEAST_SHARE) else None


def kernels_in(visits: Sequence[Visit], wide: np.dtype) -> WideKernels | None:
    """Returns the kernels that keep float32, None where none does.

    Args:
        visits: What `walk_plan` returns.
        wide: The wide dtype of the policy.
    """
    found = [v for v in visits if is_wide_kernel(v.eqn, v.plan.reads, wide)]
    each = [v.times * kernel_flops(v.eqn) for v in found]
    products = [v for v in visits if v.eqn.primitive.name in CONTRACTIONS]
    total = sum(each) + sum(v.times * flops(v.eqn) for v in products)
    if not found:
        return None
    largest = found[max(range(len(found)), key=each.__getitem__)]
    return WideKernels(sum(each), sum(each) / total, largest, wide)
