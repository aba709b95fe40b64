"""Lines of the user's program that recur with equal plans are emitted by one jaxpr each.

A model of twelve layers, written out, repeats each line of a layer twelve times. Its equations are
emitted once, into a jaxpr that JAX inlines at each occurrence, and differentiates, transposes and
lowers once. The program has the equations of flat emission, in the same order: plans, types,
literals, and names relative to the line, are the key of the jaxpr. It is a line and not a layer,
because JAX gives all that it inlines the source line of the call.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ...policies.callables import has_hash
from ..compat import (
    JaxprEqn,
    Literal,
    Tracer,
    common_scopes,
    inlined_once,
    is_ref,
    mark_frames,
    needs_float64,
    relative_contexts,
    source_file_and_line,
    within_scopes,
)
from ..compat.rebuilding import with_equations
from ..plan.data import Bind, Cast, Contract, EquationPlan, Inside, Keep, Move, Plan
from ..plan.kinds import literal_key
from ..primitives.structure import is_plain_call
from .values import Value

mark_frames(__file__)

# A call costs as much as an equation, and its jaxpr as much as some equations.
_LEAST = 6


class Body(NamedTuple):
    """The equations of a line, with the fields of a jaxpr that `evaluate` needs."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[JaxprEqn]


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A line that recurs.

    Args:
        body: Its equations, as they stand where it occurs first.
        plans: Their plans.
        casts: Pairs (operand, dtype) of the casts of operands.
        by_copies: Operands of which copies may be made that `casts` does not name.
    """

    body: Body
    plans: Sequence[EquationPlan]
    casts: Sequence[tuple[int, Any]]
    by_copies: frozenset[int]


Run = Callable[[Line, Sequence[Any]], Sequence[Any]]
Steps = Sequence[EquationPlan | Line]


# --- which lines recur ------------------------------------------------------------------------


def repeated_lines(
    plan: Plan, often: frozenset[Any], rule_of: Callable[[JaxprEqn], Hashable]
) -> tuple[Any, Steps]:
    """Returns a jaxpr with one equation for each occurrence of a line that recurs, and its steps.

    Args:
        plan: The plan of the jaxpr.
        often: The variables of values that are read by views; see `read_often`.
        rule_of: Returns the key of an equation's custom rules; see `ClosedOver.rule_of`.
    """
    eqns, plans = plan.jaxpr.eqns, plan.equations
    # Equations that look alike share a plan.
    of_plans = {id(p): (eqn, p) for eqn, p in zip(eqns, plans, strict=True)}
    if len(of_plans) > 0.75 * len(plans):
        return plan.jaxpr, plans
    numbers: dict[Any, int] = {}
    known: dict[int, int | None] = {}
    for i, of in of_plans.items():
        key = _plan_key(*of, rule_of)
        known[i] = None if key is None else numbers.setdefault(key, len(numbers))
    keys = tuple([known[id(p)] for p in plans])
    last = {v: i for i, eqn in enumerate(eqns) for v in eqn.invars if not isinstance(v, Literal)}
    last.update((v, len(eqns)) for v in plan.jaxpr.outvars if not isinstance(v, Literal))
    found: dict[int, Any] = {}
    for place, *whole in _runs(eqns, keys):
        for start, stop in _without_moves(*whole, eqns, plans, last):
            key, operands, results = _key(range(start, stop), eqns, keys, last, often)
            found[start] = stop, (place, key), operands, results
    counts = Counter(key for _, key, *_ in found.values())
    lines: dict[Hashable, Line | None] = {}
    made: list[JaxprEqn] = []
    steps: list[EquationPlan | Line] = []
    i = 0
    while i < len(eqns):
        stop, key, operands, results = found.get(i, (i + 1, None, [], []))
        line = None
        if (counts[key] - 1) * (stop - i - 1) >= _LEAST:
            window = eqns[i:stop]
            scopes = common_scopes(window)
            if key not in lines:
                lines[key] = _line(window, plans[i:stop], operands, results, len(scopes))
            line = lines[key]
        if line is not None:
            call = eqns[i].replace(invars=operands, outvars=results)
            made.append(within_scopes(call, scopes))
            steps.append(line)
        else:
            made.extend(eqns[i:stop])
            steps.extend(plans[i:stop])
        i = stop
    return with_equations(plan.jaxpr, made), steps


def _runs(eqns: Sequence[JaxprEqn], keys: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Yields the source lines, and the ranges of their equations that may be outlined.

    A line that a loop repeats is one range for each iteration.
    """
    places: dict[Any, str] = {}
    of: list[str | None] = []
    for eqn, key in zip(eqns, keys, strict=True):
        if key is None:
            of.append(None)
            continue
        traceback = eqn.source_info.traceback
        if (place := places.get(traceback)) is None:
            place = places[traceback] = source_file_and_line(eqn)
        of.append(place)
    start = 0
    for i in range(1, len(of) + 1):
        if i == len(of) or of[i] != of[start]:
            if (place := of[start]) is not None and i - start > 1:
                period = _period(keys[start:i])
                yield from ((place, k, min(k + period, i)) for k in range(start, i, period))
            start = i


def _period(keys: Sequence[Any]) -> int:
    """Returns after how many equations a line repeats, their number where it does not."""
    latest: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    for i, key in enumerate(keys):
        if key in latest:
            distances[i - latest[key]] += 1
        latest[key] = i
    for period, _ in distances.most_common(4):
        same = sum(map(operator.eq, keys, keys[period:]))
        if 1 < period <= len(keys) // 3 and same >= 0.8 * (len(keys) - period):
            return period
    return len(keys)


def _without_moves(
    start: int,
    stop: int,
    eqns: Sequence[JaxprEqn],
    plans: Sequence[EquationPlan],
    last: Mapping[Any, int],
) -> Iterator[tuple[int, int]]:
    """Splits a range at moved sources that are used behind it: their copies are made there."""
    for i in range(start, stop + 1):
        is_cut = i < stop and isinstance(plans[i].action, Move)
        if i == stop or (is_cut and any(last.get(v, -1) >= stop for v in eqns[i].outvars)):
            if i - start > 1:
                yield start, i
            start = i + 1


def _key(
    positions: range,
    eqns: Sequence[JaxprEqn],
    keys: Sequence[Any],
    last: Mapping[Any, int],
    often: frozenset[Any],
) -> tuple[Hashable, list[Any], list[Any]]:
    """Returns all that the emission of a line follows from, its operands and its results."""
    window = eqns[positions.start : positions.stop]
    parts: list[Hashable] = [keys[positions.start : positions.stop]]
    local: dict[Any, int] = {}
    operands: dict[Any, int] = {}
    results: list[Any] = []
    for eqn in window:
        for v in eqn.invars:
            if isinstance(v, Literal):
                parts.append(literal_key(v))
            elif v in local:
                parts.append(local[v])
            elif v in operands:
                parts.append(-1 - operands[v])
            else:
                parts.append(v.aval)
                operands[v] = len(operands)
        for v in eqn.outvars:
            local[v] = len(local)
            if last.get(v, -1) >= positions.stop:
                parts.append((local[v], v in often))
                results.append(v)
            elif v in often:
                parts.append("often")
    return (*parts, relative_contexts(window)), list(operands), results


def _plan_key(
    eqn: JaxprEqn, plan: EquationPlan, rule_of: Callable[[JaxprEqn], Hashable]
) -> Hashable:
    """Returns a key of an equation and its plan but for its variables; None for no outlining."""
    action = plan.action
    if eqn.effects:
        return None
    params: Any = tuple(eqn.params.items())
    if isinstance(action, Inside):
        is_call = is_plain_call(eqn)
        has_rules = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        if action.inlined or any(is_ref(v.aval) for v in eqn.invars) or not (is_call or has_rules):
            return None
        (inner,) = action.plans
        of_action: Any = action.unchanged, id(inner)
        params = eqn.params.get("name")
        if has_rules:
            of_inner = id(inner.equations), inner.inputs, inner.outputs, inner.output_dtypes
            of_action, params = (action.unchanged, of_inner), rule_of(eqn)
    elif isinstance(action, Bind):
        of_action = tuple(action.params.items()), action.replicates
    elif isinstance(action, Contract):
        of_action = tuple(action.params.items()), action.of_sources
    elif isinstance(action, Keep | Cast | Move):
        of_action = None
    else:
        return None
    if any(state.tag is not None for state in (*plan.given, *plan.results)):
        return None
    states = [
        (s.dtype, s.keeps_gradient, s.known_value, s.const_range and id(s.const_range))
        for s in plan.results
    ]
    avals = tuple([v.aval for v in eqn.invars])
    key = (eqn.primitive, params, avals, type(action), of_action, plan.operands, plan.casts)
    return (*key, *states) if has_hash(key) else None


def _line(
    window: Sequence[JaxprEqn],
    plans: Sequence[EquationPlan],
    operands: Sequence[Any],
    results: Sequence[Any],
    scopes: int,
) -> Line | None:
    if not results or any(needs_float64(eqn) for eqn in window):
        return None
    numbers = {v: i for i, v in enumerate(operands)}
    casts: dict[tuple[int, Any], None] = {}
    by_copies: set[int] = set()
    for eqn, plan in zip(window, plans, strict=True):
        replicates = plan.action.replicates if isinstance(plan.action, Bind) else ()
        is_whole = isinstance(plan.action, Move | Inside)
        for k, (v, dtype) in enumerate(zip(eqn.invars, plan.operands, strict=True)):
            if isinstance(v, Literal) or v not in numbers:
                continue
            if is_whole or k in replicates:
                by_copies.add(numbers[v])
            if dtype is not None:
                casts[numbers[v], dtype] = None
    eqns = [within_scopes(eqn, eqn.source_info.name_stack.stack[scopes:]) for eqn in window]
    return Line(Body((), operands, results, eqns), plans, tuple(casts), frozenset(by_copies))


# --- emission -----------------------------------------------------------------------------------


class _Traced(NamedTuple):
    """The jaxpr of a line for operands of one kind.

    Args:
        call: Binds its equations, and returns its arrays.
        results: Values whose arrays are positions of the arrays.
        copies: Triples (operand, key, position) of the copies of operands that it makes.
    """

    call: Callable[..., Sequence[Any]]
    results: Sequence[Value]
    copies: Sequence[tuple[int, Any, int]]


def emit_line(line: Line, operands: Sequence[Any], run: Run, memo: dict[Any, Any]) -> Sequence[Any]:
    """Emits one occurrence of a line.

    Args:
        line: The line.
        operands: Its operands, as `Value`.
        run: Emits the equations of a line one by one.
        memo: What was traced already.

    Returns:
        Its results, as `Value`.
    """
    if not _is_traceable(line, operands):
        return run(line, operands)
    for i, dtype in line.casts:
        # A moved source makes its copies where it was moved.
        if operands[i].move:
            operands[i].copy(dtype)
    held = [(value, tuple(value.copies)) for value in operands]
    arrays = [x for value, keys in held for x in (value.array, *[value.copies[k] for k in keys])]
    types = tuple(map(jax.typeof, arrays))
    kinds = [(v.source, v.known, id(v.const_range), v.meets_in_float32, keys) for v, keys in held]
    key = (line, types, *kinds)
    if key not in memo:
        memo[key] = _traced(line, operands, types, run)
    traced = memo[key]
    found = traced.call(*arrays)
    for i, k, position in traced.copies:
        operands[i].copies[k] = found[position]
    return [_with_arrays(value, found) for value in traced.results]


def _is_traceable(line: Line, operands: Sequence[Any]) -> bool:
    cast = {i for i, _ in line.casts} | line.by_copies
    return all(
        isinstance(value, Value)
        and value.tag is None
        # The copies of an array that is known now are made now.
        and (isinstance(value.array, Tracer) or i not in cast)
        and not (value.move and i in line.by_copies)
        for i, value in enumerate(operands)
    )


def _traced(line: Line, operands: Sequence[Any], types: Sequence[Any], run: Run) -> _Traced:
    results: list[Value] = []
    copies: list[tuple[int, Any, int]] = []

    def function(*xs: Any) -> list[Any]:
        arrays = iter(xs)
        given = []
        for value in operands:
            given.append(dataclasses.replace(value, array=next(arrays), move=None))
            given[-1].copies.update((k, next(arrays)) for k in value.copies)
        made: dict[int, tuple[int, Any]] = {}

        def position(x: Any) -> int:
            return made.setdefault(id(x), (len(made), x))[0]

        for value in run(line, given):
            results.append(dataclasses.replace(value, array=position(value.array)))
            results[-1].copies.update((k, position(x)) for k, x in value.copies.items())
        for i, (value, before) in enumerate(zip(given, operands, strict=True)):
            new = [(k, x) for k, x in value.copies.items() if k not in before.copies]
            copies.extend((i, k, position(x)) for k, x in new)
        return [x for _, x in made.values()]

    return _Traced(inlined_once(function, types), results, copies)


def _with_arrays(value: Value, arrays: Sequence[Any]) -> Value:
    made = dataclasses.replace(value, array=arrays[value.array])
    made.copies.update((k, arrays[i]) for k, i in value.copies.items())
    return made
