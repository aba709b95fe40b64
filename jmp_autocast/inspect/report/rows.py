"""The rows of a report: the equations of a plan as plain data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jax.export import is_symbolic_dim

from ...call.arguments import name_of
from ...interpreters.after.walk import Visit
from ...interpreters.compat import ASSUMED_LENGTH, Atom, JaxprEqn, source_line
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import bodies
from ...policies import STRUCTURAL, CastPolicy, Policy
from .jaxprs import flops_of, nbytes_of


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One equation of a planned program. All fields are strings, numbers and tuples of them.

    Args:
        index: The position of the row among the rows.
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        depth: The number of loops, branches and calls around the equation.
        inner: The number of rows of the equations in its bodies, which follow this row.
        times: How often it runs in one call: the product of the lengths of the loops around it. The
            body of a ``while`` counts once.
        operand_shapes: The shape of each operand.
        result_shapes: The shape of each result.
        declared_operands: The dtype of each operand as the program declares it.
        operands: The dtype of each operand as it runs.
        declared_results: The dtype of each result as the program declares it.
        results: The dtype of each result as it runs.
        rule: The rule of the primitive: the name of its cast policy, or of the function that
            chooses one; ``""`` if no rule applies, because the bodies of the equation are planned.
        reason: The code of the reason for these dtypes; `jmp_autocast.interpreters.ReasonCode`
            lists them.
        cause: The operand, consumer, scope or rule behind the reason, ``""`` if the code is enough.
        operand_rows: The index of the row of each operand's producer, also across the boundaries of
            calls and loops; None for inputs, constants and literals. The producer of a carry, or of
            a result of a ``cond``, is the loop or ``cond``.
        operand_inputs: The path of each operand in the arguments of the program, such as
            ``"0/dense/kernel"``; ``""`` for other values.
        operand_sources: The kind of each operand that is a source: ``"param"``, ``"data"``,
            ``"const"`` or ``"literal"``, also if it was moved or cast; ``""`` for computed values.
        cause_operands: The positions of the operands that caused the dtypes; ``operand_rows`` has
            the rows that produced them.
        flops: Estimated floating point operations, over all ``times``; 0 for data movement, casts,
            and equations with bodies.
        nbytes: Bytes of operands and results in the dtypes that run, over all ``times``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> x = jnp.ones((4, 8))
        >>> (row,) = explain(jnp.matmul, x, x.T, policy=BF16).rows
        >>> row.primitive, row.declared_operands, row.operands, row.flops
        ('dot_general', ('float32', 'float32'), ('bfloat16', 'bfloat16'), 256)
    """

    index: int
    scope: str
    source: str
    primitive: str
    depth: int
    inner: int
    times: int
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    declared_operands: tuple[str, ...]
    operands: tuple[str, ...]
    declared_results: tuple[str, ...]
    results: tuple[str, ...]
    rule: str
    reason: str
    cause: str
    operand_rows: tuple[int | None, ...]
    operand_inputs: tuple[str, ...]
    operand_sources: tuple[str, ...]
    cause_operands: tuple[int, ...]
    flops: int
    nbytes: int


def rows_of(visits: Sequence[Visit], policy: Policy) -> list[Row]:
    """Returns the rows of a plan, in program order; the bodies of an equation follow it.

    Args:
        visits: The result of `walk_plan` with the paths of the program's inputs in the arguments.
        policy: The policy of the plan.
    """
    return [_row(visit, policy) for visit in visits]


def note_on_sizes(rows: Iterable[Row]) -> str:
    """Returns a note on FLOPs and bytes if a length in the rows is symbolic, else ""."""
    shapes = (shape for row in rows for shape in (*row.operand_shapes, *row.result_shapes))
    symbolic = any(map(is_symbolic_dim, itertools.chain.from_iterable(shapes)))
    return f"symbolic lengths count as {ASSUMED_LENGTH}" if symbolic else ""


def _row(visit: Visit, policy: Policy) -> Row:
    eqn, plan, times = visit.eqn, visit.plan, visit.times
    # In a program rewritten by autocast, a primitive of this package may hold a contraction. Its
    # further operands are float32 arrays whose 16-bit copies it multiplies: the row has only the
    # copies.
    ran = contraction_in(eqn) or eqn
    invars = eqn.invars[: len(ran.invars)]
    operands = list(map(_name, invars, plan.reads))
    results = list(map(_name, eqn.outvars, (state.dtype for state in plan.results)))
    atoms = [*invars, *eqn.outvars]
    origins = visit.origins[: len(invars)]
    return Row(
        index=visit.index,
        scope="/".join(visit.scope),
        source=source_line(eqn),
        primitive=ran.primitive.name,
        depth=visit.depth,
        inner=visit.inner,
        times=times,
        operand_shapes=tuple(map(_shape, invars)),
        result_shapes=tuple(map(_shape, eqn.outvars)),
        declared_operands=tuple(map(_name, invars)),
        operands=tuple(operands),
        declared_results=tuple(map(_name, eqn.outvars)),
        results=tuple(results),
        rule=_rule_name(policy, eqn, visit.scope),
        reason=plan.reason.code.value,
        cause=plan.reason.cause,
        operand_rows=tuple(x if isinstance(x, int) else None for x in origins),
        operand_inputs=tuple(x if isinstance(x, str) else "" for x in origins),
        operand_sources=tuple(
            s.source.value if s.source else "" for s in plan.given[: len(invars)]
        ),
        cause_operands=plan.reason.operands,
        flops=times * flops_of(eqn),
        nbytes=times * sum(map(nbytes_of, atoms, [*operands, *results])),
    )


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _name(atom: Atom, dtype: Any = None) -> str:
    """Returns the name of ``dtype``, by default the declared dtype of a variable or literal."""
    dtype = dtype or getattr(atom.aval, "dtype", None)
    return str(getattr(dtype, "name", dtype))


def _rule_name(policy: Policy, eqn: JaxprEqn, scope: Sequence[str]) -> str:
    name = eqn.primitive.name
    rule, origin = policy.rule_for(name, scope)
    if origin == "unknown" and (name in STRUCTURAL or bodies(eqn)):
        return ""  # the equation has no rule: its bodies are planned, or it is a cast
    return rule.name if isinstance(rule, CastPolicy) else name_of(rule)


SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "float8_e4m3fn": "f8",
}
"""Short names of dtypes."""


def short_dtypes(row: Row) -> str:
    """Returns the dtypes of operands and results, such as ``"bf16 -> f32"``."""
    ends = [[SHORT.get(name, name) for name in names] for names in (row.operands, row.results)]
    return " -> ".join(", ".join(dict.fromkeys(names)) for names in ends)


def reason_of(row: Row) -> str:
    """Returns the reason code of a row, and the cause in parentheses if the row has one."""
    return f"{row.reason} ({row.cause})" if row.cause else row.reason
