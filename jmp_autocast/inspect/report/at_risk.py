"""Equations that lose precision in 16 bits, whether the planner raises them to float32 or not."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...autocast import PlannedCall
from ...interpreters import Planner
from ...interpreters.after.walk import Visit, walk_plan
from ...interpreters.compat import body_of, source_line
from ...interpreters.plan.avals import float_dtype, is_16_bit
from ...interpreters.plan.data import (
    READ_BY,
    Plan,
    ReasonCode,
    Request,
    ValueState,
    input_states,
)
from ...interpreters.plan.needs import DECOMPOSES, ROWS
from ...interpreters.primitives.structure import equations_in
from ...interpreters.primitives.traits import having
from ...policies import COMPUTE_DTYPES, FLOAT32, Policy
from ..measure.measured import user_names
from .reasons import explanations

_NEEDS = {READ_BY + row.consumer: row for row in ROWS if row.consumer}

# If an equation is in float32 for one of these reasons, its own numerics need float32. For any
# other reason, it has the dtype of an operand or a consumer.
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

_CONTRACTS, _TURNS = having("contracts"), having("turns")
# These primitives scale or shift a product if one operand is the product and all other operands are
# sources: inputs, constants, literals, or values computed only from these.
_SCALES = having("moves") | {"convert_element_type", "neg", "mul", "div", "add", "add_any", "sub"}
_CANCELS = "It is a difference of two 16-bit products, whose rounding remains where they cancel."
_SOLVES = "Its operand comes from a 16-bit product, whose rounding a condition number multiplies."
_WAVES = "Its angle is computed of 16-bit operands, which a high frequency needs in float32."


@dataclasses.dataclass(frozen=True)
class AtRisk:
    """Equations of one source line that lose precision in 16 bits.

    If ``reason`` is ``"LEFT"``, they lose precision with `autocast`, too. Otherwise the program
    declares them in 16 bits, and the planner raises them to float32: they lose precision only
    without `autocast`.

    Args:
        primitive: The primitive's name.
        dtype: The 16-bit dtype.
        reason: The code of the planner's reason, or ``"LEFT"``.
        because: The reason in a sentence.
        equations: The number of these equations.
        scope: The scopes around the first equation, joined by ``/``.
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
    """Returns the equations declared in 16 bits that the planner raises to float32, in order.

    A policy has one 16-bit dtype. If the program declares values in the other 16-bit dtype, a
    second plan is made for them.
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
    return _risks(scopes)


def _risks(scopes: Mapping[tuple[str, ...], Sequence[str]]) -> tuple[AtRisk, ...]:
    return tuple(
        AtRisk(*key[:4], equations=len(found), scope=found[0], source=key[4])
        for key, found in scopes.items()
    )


def left_at_risk(visits: Sequence[Visit], dtype: str) -> tuple[AtRisk, ...]:
    """Returns the equations that lose precision with `autocast`, from the visits of its plan."""
    scopes: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    # The sign of the 16-bit product that each equation computes, scales or shifts; 0 without one.
    signs: list[int] = []
    comes: list[bool] = []  # whether each equation depends on a 16-bit product
    around: list[int] = []
    for visit, source in _with_lines(visits):
        name, given, results = visit.eqn.primitive.name, visit.plan.given, visit.plan.results
        del around[visit.depth :]
        around.append(visit.index)
        made = [signs[i] if isinstance(i, int) else 0 for i in visit.origins]
        is_low = any([d is not None and is_16_bit(d) for d in visit.plan.reads])
        is_product = name in _CONTRACTS and is_low
        is_made = any([isinstance(i, int) and comes[i] for i in visit.origins])
        signs.append(int(is_product) or _sign(name, made, given))
        comes.append(False)
        if (is_product or is_made) and any([r.dtype for r in results]):
            for i in around:  # the enclosing loops and calls depend on the product, too
                comes[i] = True
        because = ""
        if name in ("sub", "add", "add_any") and all(made):
            because = _CANCELS if (made[0] == made[1]) == (name == "sub") else ""
        elif name in DECOMPOSES and is_made:
            because = _SOLVES
        elif name in _TURNS and (is_low or any(made)):
            because = _WAVES
        if because:
            key = (name, dtype, "LEFT", because, source)
            scopes[key].append("/".join(user_names(visit.scope)))
    return _risks(scopes)


def _sign(name: str, made: Sequence[int], given: Sequence[ValueState]) -> int:
    """Returns the sign of the product that an equation scales or shifts, 0 if it does neither."""
    others = [s for s, sign in zip(given, made, strict=True) if not sign]
    if name not in _SCALES or not all([s.source for s in others]) or len(made) != len(others) + 1:
        return 0
    scale = -1 if name in ("mul", "div") and any([(s.known_value or 0) < 0 for s in others]) else 1
    return sum(made) * (-1 if name == "neg" or (name == "sub" and made[1]) else scale)


def _plan_in(dtype: np.dtype, planned: PlannedCall, policy: Policy) -> Plan:
    """Returns the plan of a program under its policy with another compute dtype."""
    other = dataclasses.replace(policy, compute_dtype=dtype)
    planner = Planner(other)
    closed = planner.prepare(planned.traced)
    body = body_of(closed)
    inputs = input_states(body.invars, planned.call.sources, other)
    return planner.plan_program(closed, inputs, [Request()] * len(body.outvars))


def _with_lines(visits: Sequence[Visit]) -> Iterator[tuple[Visit, str]]:
    """Yields equations with their source lines."""
    lines: list[str] = []
    for visit in visits:
        # An equation inside a function of JAX, such as `jnp.where`, gets the source line of the
        # enclosing call.
        del lines[visit.depth :]
        lines.append(source_line(visit.eqn) or (lines[-1] if lines else ""))
        yield visit, lines[-1]


def _raised(visits: Sequence[Visit], dtype: np.dtype) -> Iterator[tuple[Visit, str]]:
    """Yields the equations raised to float32 for their own numerics, with their source lines."""
    for visit, line in _with_lines(visits):
        eqn, plan = visit.eqn, visit.plan
        if plan.reason.code not in _RAISES and plan.reason.cause not in _NEEDS:
            continue
        results = [state.dtype for state in plan.results]
        ends = zip((*eqn.invars, *eqn.outvars), (*plan.reads, *results), strict=True)
        raised = [v for v, planned in ends if planned == FLOAT32]
        if plan.reason.code is ReasonCode.CARRY_ACCUMULATOR:
            raised = [eqn.invars[i] for i in plan.reason.operands]
        if any(float_dtype(v.aval) == dtype for v in raised):
            yield visit, line


def _sentence(visit: Visit) -> str:
    """Returns the planner's reason in one sentence."""
    reason = visit.plan.reason
    if (need := _NEEDS.get(reason.cause)) is not None:
        return f"It is {reason.cause}: {need.why}."
    if reason.code is ReasonCode.LITERAL:
        return f"{reason.cause}."
    text = explanations()[reason.code].says.partition(":")[0].partition(". ")[0]
    return text.removesuffix(".") + "."
