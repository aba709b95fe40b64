"""`Plan` -> rows: one equation each, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...arguments import name_of
from ...interpreters.compat import Literal, scope_names
from ...interpreters.plan.data import EquationPlan, Plan, ValueState
from ...interpreters.plan.equation_view import view_of
from ...interpreters.plan.value_facts import literal_state
from ...policies import DATA_MOVEMENT, STRUCTURAL, CastPolicy, Policy
from .jaxprs import iterations, nbytes_of
from .provenance import Links, links_of

NOT_ARITHMETIC = DATA_MOVEMENT | STRUCTURAL


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One equation of a planned program. All fields are strings, numbers and tuples of them.

    Args:
        index: The position of the row among the rows.
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        depth: The number of loops, branches and calls around the equation.
        inner: The number of rows inside the equation; they follow it.
        times: How often it runs in one call: the product of the lengths of the loops around it. A
            ``while`` counts once.
        operand_shapes: The shape of each operand.
        result_shapes: The shape of each result.
        declared_operands: The dtype of each operand as the program declares it.
        operands: The dtype in which each operand is read.
        declared_results: The dtype of each result as the program declares it.
        results: The dtype that each result has.
        rule: The rule of the primitive: the name of its cast policy or, where a function of the
            equation chooses that, the function's; ``""`` where the inside of the primitive is
            planned.
        reason: The code of the reason for these dtypes; `jmp_autocast.interpreters.plan.Code`
            lists them.
        cause: The operand, consumer, scope or rule behind the reason, ``""`` where the code says
            it all.
        operand_rows: The index of the row that made each operand, also across the boundaries of
            calls and loops; None for inputs, constants and literals. What a loop carries, or the
            branches of a ``cond`` return, is made by the row of the loop or ``cond``.
        operand_inputs: The path of each operand in the arguments of the program, such as
            ``"0/dense/kernel"``; ``""`` for what is no input.
        operand_sources: What each operand is that nothing has computed: ``"param"``, ``"data"``,
            ``"const"`` or ``"literal"``, also if it was moved or cast; ``""`` for what is computed.
        cause_operands: The positions of the operands that the reason points at.
        cause_rows: The indices of the rows that the reason points at: those that made the operands
            which decided, the reader that decided, what a carry starts as and is returned as, what
            the branches or the inside of a call return. Empty where a rule, a scope, the program or
            an input decided.
        flops: Estimated floating point operations, over all ``times``; 0 for data movement,
            casts, and what has an inside.
        nbytes: Bytes of operands and results in these dtypes, over all ``times``.
        declared_nbytes: The same in the declared dtypes.

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
    cause_rows: tuple[int, ...]
    flops: int
    nbytes: int
    declared_nbytes: int


def rows_of(plan: Plan, policy: Policy, paths: Sequence[str]) -> list[Row]:
    """Returns the rows of a plan, in program order; what is inside an equation follows it.

    Args:
        plan: The plan of the whole program.
        policy: The policy that it was made with.
        paths: The path of each input in the arguments.
    """
    links = iter(enumerate(links_of(plan, paths)))
    return list(_walk(plan, policy, links, (), 0, 1))


def _walk(
    plan: Plan,
    policy: Policy,
    links: Iterator[tuple[int, Links]],
    names: tuple[str, ...],
    depth: int,
    times: int,
) -> Iterator[Row]:
    body = plan.jaxpr
    states = dict(zip(body.constvars, plan.consts, strict=True))
    states.update(zip(body.invars, plan.inputs, strict=True))
    for eqn, equation in zip(body.eqns, plan.equations, strict=True):
        given = [literal_state(v) if isinstance(v, Literal) else states[v] for v in eqn.invars]
        path = names + scope_names(eqn)
        yield _row(eqn, equation, given, policy, next(links), path, depth, times)
        for inner in equation.inner:
            yield from _walk(inner, policy, links, path, depth + 1, times * iterations(eqn))
        states.update(zip(eqn.outvars, equation.results, strict=True))


def _row(
    eqn: Any,
    equation: EquationPlan,
    given: Sequence[ValueState],
    policy: Policy,
    linked: tuple[int, Links],
    path: tuple[str, ...],
    depth: int,
    times: int,
) -> Row:
    index, links = linked
    view = view_of(eqn, given, path, np.dtype(policy.compute_dtype))
    read = [
        _name(dtype or state.dtype or _dtype(v))
        for v, state, dtype in zip(eqn.invars, given, equation.operands, strict=True)
    ]
    made = [
        _name(state.dtype or _dtype(v))
        for v, state in zip(eqn.outvars, equation.results, strict=True)
    ]
    atoms = [*eqn.invars, *eqn.outvars]
    declared = [_name(_dtype(v)) for v in atoms]
    return Row(
        index=index,
        scope=view.scope,
        source=view.source,
        primitive=view.primitive,
        depth=depth,
        inner=links.inner,
        times=times,
        operand_shapes=view.operand_shapes,
        result_shapes=view.result_shapes,
        declared_operands=tuple(declared[: len(read)]),
        operands=tuple(read),
        declared_results=tuple(declared[len(read) :]),
        results=tuple(made),
        rule=_rule_name(policy, view.primitive, path),
        reason=equation.reason.code.value,
        cause=equation.reason.cause,
        operand_rows=tuple(x if isinstance(x, int) else None for x in links.operands),
        operand_inputs=tuple(x if isinstance(x, str) else "" for x in links.operands),
        operand_sources=tuple(state.source.value if state.source else "" for state in given),
        cause_operands=equation.reason.operands,
        cause_rows=links.causes,
        flops=0 if view.primitive in NOT_ARITHMETIC else times * view.flops,
        nbytes=times * sum(map(nbytes_of, atoms, [*read, *made])),
        declared_nbytes=times * sum(map(nbytes_of, atoms)),
    )


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)


def _name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype))


def _rule_name(policy: Policy, primitive: str, path: Sequence[str]) -> str:
    if primitive in STRUCTURAL:
        return ""
    rule, _ = policy.rule_for(primitive, policy.rules_in(path))
    return rule.name if isinstance(rule, CastPolicy) else name_of(rule)
