"""The equations that a program declares in 16 bits, and the planner raises to float32."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ...autocast import PlannedCall
from ...interpreters import Planner
from ...interpreters.after.walk import Visit, walk_plan
from ...interpreters.compat import body_of, source_line
from ...interpreters.plan.data import Plan, Want
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.plan.needs import ROWS
from ...interpreters.plan.reasons import READ_BY, ReasonCode
from ...interpreters.plan.value_facts import input_states
from ...interpreters.primitives.structure import equations_in
from ...policies import COMPUTE_DTYPES, FLOAT32, Policy
from ..measure.measured import user_names
from .reasons import explanations

_NEEDS = {READ_BY + row.reader: row for row in ROWS if row.reader}

# These reasons raise an equation for its own sake. All others follow an operand or a consumer.
_RAISES = frozenset(
    (
        ReasonCode.FP32,
        ReasonCode.LOG_GUARD,
        ReasonCode.LITERAL,
        ReasonCode.COORD,
        ReasonCode.ACCUMULATOR,
        ReasonCode.CARRY_ACCUMULATOR,
    )
)


@dataclasses.dataclass(frozen=True)
class AtRisk:
    """Equations that the program declares in 16 bits, and that the planner raises to float32.

    Without `autocast` the program loses precision in them.

    Args:
        primitive: The primitive's name.
        dtype: The 16-bit dtype.
        reason: The code of the planner's reason.
        because: The same in a sentence.
        equations: The number of equations of the source line.
        scope: The scopes around the first one, joined by ``/``.
        source: The source line.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> def attention(q, k):
        ...     return jax.nn.softmax(q @ k.T)
        >>> q = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
        >>> (risk,) = explain(attention, q, q, policy=BF16).at_risk
        >>> risk.primitive, risk.dtype, risk.because
        ('exp', 'bfloat16', 'The operation loses too much in 16 bits.')
    """

    primitive: str
    dtype: str
    reason: str
    because: str
    equations: int
    scope: str
    source: str


def at_risk(planned: PlannedCall, policy: Policy) -> tuple[AtRisk, ...]:
    """Returns the equations at risk in program order.

    The policy has one 16-bit dtype. A program may declare the other one, which needs a second plan.
    """
    scopes: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    atoms = [v for eqn, _ in equations_in(planned.closed) for v in (*eqn.invars, *eqn.outvars)]
    declared = {float_dtype(v.aval) for v in atoms}
    lowered = planned.choice.dtype if planned.choice else policy.compute_dtype
    for dtype in COMPUTE_DTYPES:
        if dtype not in declared:
            continue
        plan = planned.plan if dtype == lowered else _plan_in(dtype, planned, policy)
        for visit, source in _raised(walk_plan(plan), dtype):
            reason = visit.plan.reason.code
            key = (visit.eqn.primitive.name, str(dtype), reason.value, _sentence(visit), source)
            scopes[key].append("/".join(user_names(visit.scope)))
    return tuple(
        AtRisk(*key[:4], equations=len(found), scope=found[0], source=key[4])
        for key, found in scopes.items()
    )


def _plan_in(dtype: np.dtype, planned: PlannedCall, policy: Policy) -> Plan:
    """Returns the plan under the same policy with another compute dtype."""
    other = dataclasses.replace(policy, compute_dtype=dtype)
    planner = Planner(other)
    closed = planner.prepare(planned.traced)
    body = body_of(closed)
    inputs = input_states(body.invars, planned.call.sources, other)
    return planner.plan_program(closed, inputs, [Want()] * len(body.outvars))


def _raised(visits: Sequence[Visit], dtype: np.dtype) -> Iterator[tuple[Visit, str]]:
    """Yields the equations that a plan raises for their own sake, with their source lines."""
    lines: list[str] = []
    for visit in visits:
        # Equations inside JAX's own functions, such as `jnp.where`, have no line of the user.
        del lines[visit.depth :]
        lines.append(source_line(visit.eqn) or (lines[-1] if lines else ""))
        eqn, plan = visit.eqn, visit.plan
        if plan.reason.code not in _RAISES and plan.reason.cause not in _NEEDS:
            continue
        results = [state.dtype for state in plan.results]
        ends = zip((*eqn.invars, *eqn.outvars), (*plan.reads, *results), strict=True)
        raised = [v for v, planned in ends if planned == FLOAT32]
        if plan.reason.code is ReasonCode.CARRY_ACCUMULATOR:
            raised = [eqn.invars[i] for i in plan.reason.operands]
        if any(float_dtype(v.aval) == dtype for v in raised):
            yield visit, lines[-1]


def _sentence(visit: Visit) -> str:
    """Returns the planner's reason in one sentence."""
    reason = visit.plan.reason
    if (need := _NEEDS.get(reason.cause)) is not None:
        return f"It is {reason.cause}: {need.why}."
    if reason.code is ReasonCode.LITERAL:
        return f"{reason.cause}."
    text = explanations()[reason.code].says.partition(":")[0].partition(". ")[0]
    return text.removesuffix(".") + "."
