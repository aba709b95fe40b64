"""Warnings about products and kernels that stay in float32, for users who did not print a plan.

A guard keeps a product in float32 if 16 bits cannot hold its operands well enough. A product also
stays in float32 if the program sets its precision (``precision=HIGHEST``). A model from elsewhere
may set the precision of all products, so that autocast does nothing. A kernel keeps its dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...policies import FLOAT32
from ..compat import JaxprEqn, aval_of, is_array_aval, source_line
from ..plan.avals import at_least
from ..plan.data import EquationPlan, Plan, ReasonCode
from ..primitives.flops import flops, kernel_flops
from ..primitives.reading import names_algorithm
from ..primitives.traits import having
from .walk import Visit, equations_once, walk_plan

_CONTRACTS = having("contracts")

GUARDS = (ReasonCode.COORD, ReasonCode.LITERAL)
"""The reason codes of guards; a user's precision is no guard."""

# Below these limits there is no warning. A GPU multiplies float32 at a sixteenth of its 16-bit
# rate: 1 % of the FLOPs in float32 is a seventh of the time. A million FLOPs take microseconds.
LEAST_SHARE, LEAST_FLOPS = 0.01, 10**6
# Precisions cause a warning only if they keep half of the FLOPs in float32. The umt5 of bonsai
# 0.1.0 does, with HIGHEST for all of its products. A Gaussian process on a network's features sets
# HIGHEST for some products, and needs no warning.
LEAST_SHARE_OF_REQUESTS = 0.5


def _is_guarded(eqn: JaxprEqn, plan: EquationPlan) -> bool:
    return eqn.primitive.name in _CONTRACTS and plan.reason.code in GUARDS


def _is_requested(eqn: JaxprEqn, plan: EquationPlan) -> bool:
    # A dot algorithm is a choice of dtypes, and needs no warning.
    is_product = eqn.primitive.name in _CONTRACTS
    return is_product and plan.reason.code is ReasonCode.USER_PRECISION and not names_algorithm(eqn)


def _is_wide_kernel(eqn: JaxprEqn, plan: EquationPlan) -> bool:
    return kernel_flops(eqn) > 0 and any(
        dtype == FLOAT32 and is_array_aval(v.aval) and aval_of(v).dtype == FLOAT32
        for v, dtype in zip(eqn.invars, plan.reads, strict=True)
    )


def warnings_of(plan: Plan, name: str, compute_dtype: Any) -> Iterator[str]:
    """Yields the warnings: how many products stay in float32, which, why, and how to change it.

    There is a warning if guards keep 1 % of the matmul and convolution FLOPs in float32, if
    precisions keep half of these FLOPs, or if kernels have 1 % of all FLOPs. There is none about
    less than a million FLOPs in one call, or about a symbolic number of FLOPs.

    Args:
        plan: The plan of a whole program.
        name: The name of the program.
        compute_dtype: The dtype of its other products.
    """
    guarded = _kept(plan, _is_guarded, LEAST_SHARE)
    if guarded := guarded or _kept(plan, _is_requested, LEAST_SHARE_OF_REQUESTS):
        percent, visit = guarded
        eqn, reason, scope = visit.eqn, visit.plan.reason, "/".join(visit.scope)
        rule = f'{{"{eqn.primitive.name}": "LOWER_PRECISION_FP"}}'
        where, within = (f"scope {scope!r}", f", scope={scope!r}") if scope else ("no scope", "")
        yield (
            f"autocast keeps {percent} of the matmul and convolution FLOPs of "
            f"{name} in float32, first of all {eqn.primitive.name} in {where} "
            f"({source_line(eqn)}): {reason.code.value}, {reason.cause}. "
            f"If {compute_dtype} will do, use policy.with_rules({rule}{within}). If float32 is "
            "what you want, say so with full_precision() around it, or silence this by "
            'warnings.filterwarnings("ignore", message="autocast keeps").'
        )
    if wide := _kept(plan, _is_wide_kernel, LEAST_SHARE):
        percent, eqn = wide[0], wide[1].eqn
        yield (
            f"autocast leaves {percent} of the matmul FLOPs of {name} in kernels "
            f"that run in float32, first of all {eqn.primitive.name} ({source_line(eqn)}): "
            f"a kernel keeps its dtypes. To run it with {compute_dtype} operands, call "
            "jmp_autocast.in_compute_dtype(function) in place of its function. If float32 is what "
            'you want, silence this by warnings.filterwarnings("ignore", message="autocast '
            'leaves").'
        )


def wide_kernel_flops(plan: Plan) -> int:
    """Returns the FLOPs of the kernels that keep float32, in one call of a program."""
    found = equations_once(plan)
    return sum(n * kernel_flops(eqn) for _, eqn, own, n in found if _is_wide_kernel(eqn, own))


def _kept(
    plan: Plan, keeps: Callable[[JaxprEqn, EquationPlan], bool], least_share: float
) -> tuple[str, Visit] | None:
    """Returns the share of the FLOPs of the equations that ``keeps`` selects, and the largest one.

    Returns None if their share of the FLOPs of all products is below a limit.
    """
    kept = others = 0
    for _, eqn, own, times in equations_once(plan):
        if keeps(eqn, own):
            kept += times * _flops(eqn)
        elif eqn.primitive.name in _CONTRACTS:
            others += times * _flops(eqn)
    if not at_least(kept, LEAST_FLOPS) or not at_least(kept, least_share * (kept + others)):
        return None
    found = [visit for visit in walk_plan(plan) if keeps(visit.eqn, visit.plan)]
    largest = max(found, key=lambda visit: visit.times * _flops(visit.eqn))
    return f"{100 * kept / (kept + others):.0f} %", largest


def _flops(eqn: JaxprEqn) -> int:
    return kernel_flops(eqn) or flops(eqn)
