"""Emits equal windows of a program, such as the layers of a model, by one shared jaxpr.

In a model of twelve layers without a loop, the equations of one layer are emitted once, into a
jaxpr that JAX inlines at each other layer, and differentiates, transposes and lowers once. The
emitted program has the same equations in the same order as without this module. The key of the
jaxpr consists of the plans, types, literals and the names relative to the window.

JAX gives all inlined equations the source line of the call. So the first layer is not shared: its
equations keep their lines, and those of the other layers get the line at which their layer begins.
Outside of such layers a window is a line of the user's program, as in the stages of a ResNet.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
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
    name_entries,
    needs_float64,
    relative_contexts,
    source_file_and_line,
    variables_in,
    within_scopes,
)
from ..compat.rebuilding import with_equations
from ..plan.data import Bind, Cast, Contract, EquationPlan, Inside, Keep, Move, Plan
from ..plan.planner import literal_key
from ..primitives.structure import is_plain_call
from .values import Value

mark_frames(__file__)

# The least number of equations to save: a call costs as much as an equation, and its jaxpr as much
# as several.
_LEAST = 6
# The least number of layers after the first one of a run. In shorter runs lines are shared: with
# four layers, the gradient then takes 1.44 instead of 1.59 of the time in float32.
_LEAST_LAYERS = 6
# Equal equations at most this far apart belong to one run.
_MAX_GAP = 4
# The number of periods that are tried, those of most equations first.
_MAX_PERIODS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """A window that recurs. It has the fields of a jaxpr, with the equations of one occurrence.

    Args:
        plans: The plans of the equations.
        casts: Pairs (operand, dtype) of the casts of operands.
        by_copies: The operands of which the window may make further copies, besides `casts`.
        used_later: The operands that equations after the window consume, too.
    """

    constvars: tuple[()]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[JaxprEqn]
    plans: Sequence[EquationPlan]
    casts: Sequence[tuple[int, Any]]
    by_copies: Collection[int]
    used_later: Collection[int]


class _Occurrence(NamedTuple):
    """The position of a window in a program, with a key that determines its emission."""

    key: Hashable
    start: int
    stop: int
    scopes: Sequence[Any]
    operands: Sequence[Any]
    results: Sequence[Any]
    used_later: Collection[int]


Run = Callable[[Window, Sequence[Any]], Sequence[Any]]
Steps = Sequence[EquationPlan | Window]


# --- which windows recur ----------------------------------------------------------------------


def repeated_windows(
    plan: Plan, often: frozenset[Any], rule_of: Callable[[JaxprEqn], Hashable]
) -> tuple[Any, Steps]:
    """Returns the jaxpr with one equation for each occurrence of a window that recurs.

    The second result holds, for each equation of this jaxpr, its plan or its `Window`.

    Args:
        plan: The plan of the jaxpr.
        often: The variables of the values that `read_often` returns.
        rule_of: Returns the key of an equation's custom rules; see `ClosedOver.rule_of`.
    """
    eqns, plans = list(plan.jaxpr.eqns), plan.equations
    # Equations with equal plans share the plan object. If few do, no window recurs.
    of_plans = {id(p): (eqn, p) for eqn, p in zip(eqns, plans, strict=True)}
    if len(of_plans) > 0.75 * len(plans):
        return plan.jaxpr, plans
    of_plans = {i: _plan_key(*of, rule_of) for i, of in of_plans.items()}
    # Numbers replace the keys of equations, because numbers hash faster, and the key of a window
    # is hashed with the keys of all its equations.
    numbers = {key: n for n, key in enumerate(of_plans.values()) if key is not None}
    of_plans = {i: numbers.get(key) for i, key in of_plans.items()}
    found = _occurrences(plan, [of_plans[id(p)] for p in plans], often)
    counts = Counter(one.key for one in found)
    windows: dict[Hashable, Window | None] = {}
    steps: list[EquationPlan | Window] = list(plans)
    for one in reversed(found):
        key, start, stop, scopes = one[:4]
        if (counts[key] - 1) * (stop - start - 1) < _LEAST:
            continue
        if key not in windows:
            windows[key] = _window(one, eqns[start:stop], plans[start:stop], len(scopes))
        if (window := windows[key]) is not None:
            call = eqns[start].replace(invars=list(one.operands), outvars=list(one.results))
            eqns[start:stop], steps[start:stop] = [within_scopes(call, scopes)], [window]
    return with_equations(plan.jaxpr, eqns), steps


def _occurrences(plan: Plan, keys: Sequence[Any], often: frozenset[Any]) -> list[_Occurrence]:
    """Returns, in order, the layers and lines of two or more equations that may share a jaxpr."""
    eqns, plans = plan.jaxpr.eqns, plan.equations
    last = {v: i for i, eqn in enumerate(eqns) for v in variables_in(eqn.invars)}
    last.update((v, len(eqns)) for v in variables_in(plan.jaxpr.outvars))
    # `moved` maps a variable to the index of the first move of its elements, such as a transpose. A
    # 16-bit copy of the move's result is made from a 16-bit copy of the variable when a consumer
    # first needs it, which may be after the window.
    moved: dict[Any, int] = {}
    for i, (eqn, of_plan) in enumerate(zip(eqns, plans, strict=True)):
        if isinstance(of_plan.action, Move):
            moved.update((v, i) for v in variables_in(eqn.invars) if v not in moved)

    def within(line: str, start: int, stop: int) -> Iterator[_Occurrence]:
        # Leaves out moves whose results are used after the window, because the copies of the
        # results are made at these later uses.
        first = start
        for i in range(start, stop + 1):
            is_move = i < stop and isinstance(plans[i].action, Move)
            if i == stop or (is_move and any(last.get(v, -1) >= stop for v in eqns[i].outvars)):
                if i - first > 1:
                    parts, *others = _parts(eqns[first:i], first, i, last, moved, often)
                    yield _Occurrence((line, *keys[first:i], *parts), first, i, *others)
                first = i + 1

    found = [one for bounds in _layers(eqns, keys, last) for one in within("", *bounds)]
    # Layers may differ in literals. Then their lines may still be equal.
    counts = Counter(one.key for one in found)
    layers = [one for one in found if counts[one.key] > 1]
    inside = {i for one in layers for i in range(one.start, one.stop)}
    lines = [one for bounds in _lines(eqns, keys, inside) for one in within(*bounds)]
    return sorted([*layers, *lines], key=attrgetter("start"))


def _layers(
    eqns: Sequence[JaxprEqn], keys: Sequence[Any], last: Mapping[Any, int]
) -> list[tuple[int, int]]:
    """Returns the bounds of the layers in each run of equal layers, without the first layer.

    A run is a sequence of equations with a period. Its layers begin where the fewest values are
    live and, among such positions, where the fewest scopes are open.
    """
    latest: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    for i, key in enumerate(keys):
        if key is not None:
            distances[i - latest.get(key, i)] += 1
            latest[key] = i
    changes = [0] * (len(eqns) + 1)
    for i, eqn in enumerate(eqns):
        for v in eqn.outvars:
            changes[i] += 1
            changes[last.get(v, i)] -= 1
    live = list(itertools.accumulate(changes))

    def cut(i: int) -> tuple[int, int]:
        return live[i - 1], len(common_scopes(eqns[i - 1 : i + 1]))

    found: list[tuple[int, int]] = []
    rest = list(keys)
    for period, _ in distances.most_common(_MAX_PERIODS):
        pairs = zip(rest, [*rest[period:], *[None] * period], strict=True)
        same = [a is not None and a == b for a, b in pairs]
        for start, stop in _runs(same) if period > 1 else ():
            if stop - start < _LEAST_LAYERS * period:
                continue
            second = min(range(start + period, start + 2 * period), key=cut)
            # Layers are divided where their own scope begins or ends, and at equations whose plans
            # differ between layers.
            scopes = [
                _own_scope(eqns[i - period], eqns[i]) if same[i - period] or same[i] else None
                for i in range(second, second + period)
            ]
            parts = [(i, j) for scope, i, j in _grouped(scopes) if scope is not None]
            layers = range(second, stop + 1, period)
            found += [(k + i, k + j) for k in layers for i, j in parts]
            rest[start : stop + period] = [None] * (stop + period - start)
    return found


def _own_scope(last: JaxprEqn, eqn: JaxprEqn) -> Sequence[Any]:
    """Returns the scope of an equation's layer, which the last layer's equation is not in."""
    stack = name_entries([eqn])
    count = len(common_scopes([last, eqn]))
    return stack[: count + 1] if count < len(stack) else ()


def _grouped(values: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yields each part of a sequence with equal values: the value and the part's bounds."""
    stop = 0
    for value, equal in itertools.groupby(values):
        start, stop = stop, stop + len(list(equal))
        yield value, start, stop


def _runs(same: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yields the bounds of the parts of a sequence with few neighboring elements that are False."""
    where = [i for i, is_same in enumerate(same) if is_same]
    ends = [k for k in range(1, len(where)) if where[k] - where[k - 1] > _MAX_GAP]
    for k, end in itertools.pairwise([0, *ends, len(where)]) if where else ():
        yield where[k], where[end - 1] + 1


def _lines(
    eqns: Sequence[JaxprEqn], keys: Sequence[Any], layers: Collection[int]
) -> list[tuple[str, int, int]]:
    """Returns the lines outside of the layers, with their bounds."""
    lines: dict[Any, str] = {}
    of: list[str | None] = []
    for i, (eqn, key) in enumerate(zip(eqns, keys, strict=True)):
        traceback = eqn.source_info.traceback
        is_shared = key is not None and i not in layers
        if is_shared and traceback not in lines:
            lines[traceback] = source_file_and_line(eqn)
        of.append(lines[traceback] if is_shared else None)
    return [part for part in _grouped(of) if part[0] is not None]


def _parts(
    window: Sequence[JaxprEqn],
    start: int,
    stop: int,
    last: Mapping[Any, int],
    moved: Mapping[Any, int],
    often: frozenset[Any],
) -> tuple[list[Hashable], Sequence[Any], list[Any], list[Any], list[int]]:
    """Returns an occurrence's key without plans, its scopes, operands, results and `used_later`.

    ``used_later`` holds the positions of the operands that equations after the window consume.
    """
    numbers: dict[Any, int] = {}
    operands: list[Any] = []
    results: list[Any] = []
    used_later: list[int] = []
    scopes = common_scopes(window)
    parts: list[Hashable] = [relative_contexts(window, len(scopes))]
    for eqn in window:
        for v in eqn.invars:
            if isinstance(v, Literal):
                parts.append(literal_key(v))
                continue
            if v not in numbers:
                numbers[v] = -1 - len(operands)
                is_used = last[v] >= stop or moved.get(v, stop) < start
                used_later += [len(operands)] * is_used
                operands.append(v)
                parts.append((v.aval, is_used))
            parts.append(numbers[v])
        for v in eqn.outvars:
            numbers[v] = len(numbers) - len(operands)
            is_used = last.get(v, -1) >= stop
            results += [v] * is_used
            parts.append((is_used, v in often))
    return parts, scopes, operands, results, used_later


def _plan_key(
    eqn: JaxprEqn, plan: EquationPlan, rule_of: Callable[[JaxprEqn], Hashable]
) -> Hashable:
    """Returns a key of an equation and its plan, without variables.

    The key is None if no shared jaxpr may hold the equation.
    """
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


def _window(
    one: _Occurrence, window: Sequence[JaxprEqn], plans: Sequence[EquationPlan], scopes: int
) -> Window | None:
    """Returns the `Window` made from an occurrence; None if no shared jaxpr may emit it.

    No shared jaxpr emits an occurrence without results, or with an equation that needs float64.
    """
    if not one.results or any(needs_float64(eqn) for eqn in window):
        return None
    numbers = {v: i for i, v in enumerate(one.operands)}
    casts: dict[tuple[int, Any], None] = {}  # a dict keeps the order
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
    eqns = [within_scopes(eqn, name_entries([eqn])[scopes:]) for eqn in window]
    operands, results = one.operands, one.results
    return Window((), operands, results, eqns, plans, tuple(casts), by_copies, one.used_later)


# --- emission -----------------------------------------------------------------------------------


class _Traced(NamedTuple):
    """The traced jaxpr of a window, for operands of given types and copies.

    Args:
        call: Binds the jaxpr's equations and returns its arrays.
        results: The results of the window. `Value.array` holds the position of the array in the
            list that ``call`` returns.
        copies: The copies of operands that the jaxpr makes, as triples: operand, key, and position
            in the list that ``call`` returns.
    """

    call: Callable[..., Sequence[Any]]
    results: Sequence[Value]
    copies: Sequence[tuple[int, Any, int]]


def emit_window(
    window: Window, operands: Sequence[Any], run: Run, memo: dict[Any, Any]
) -> Sequence[Any]:
    """Emits one occurrence of a window.

    Args:
        window: The window.
        operands: Its operands, each a `Value`.
        run: Emits the equations of a window one by one.
        memo: The cache of traced jaxprs.

    Returns:
        Its results, each a `Value`.
    """
    for i, value in enumerate(operands):
        is_cast = i in window.by_copies or any(i == k for k, _ in window.casts)
        # A window that casts a concrete array is emitted equation by equation, because the copies
        # of such an array are computed at trace time, outside of any jaxpr.
        is_known = is_cast and not isinstance(value.array, Tracer)
        if is_known or value.tag is not None or (value.move and i in window.by_copies):
            return run(window, operands)
    # The copies of moved sources are made here, outside of the window. The casts of all operands up
    # to the last such copy are made here, too, so that the casts keep their order.
    moved = [n for n, (i, _) in enumerate(window.casts, 1) if operands[i].move]
    for i, dtype in window.casts[: max(moved, default=0)]:
        operands[i].copy(dtype)
    copies = [
        [
            k
            for k in v.copies
            if i in window.by_copies or v.meets_in_float32 or (i, k) in window.casts
        ]
        for i, v in enumerate(operands)
    ]
    held = list(zip(operands, copies, strict=True))
    arrays = [x for v, keys in held for x in (v.array, *[v.copies[k] for k in keys])]
    types = tuple(map(jax.typeof, arrays))
    kinds = [(v.source, v.known, id(v.const_range), v.meets_in_float32, *keys) for v, keys in held]
    key = (window, types, *kinds)
    if key not in memo:
        memo[key] = _traced(window, held, types, run)
    found = memo[key].call(*arrays)
    for i, k, position in memo[key].copies:
        operands[i].copies[k] = found[position]
    results = []
    for value in memo[key].results:
        results.append(dataclasses.replace(value, array=found[value.array]))
        results[-1].copies.update((k, found[i]) for k, i in value.copies.items())
    return results


def _traced(window: Window, held: Sequence[Any], types: Sequence[Any], run: Run) -> _Traced:
    results: list[Value] = []
    copies: list[tuple[int, Any, int]] = []

    def function(*xs: Any) -> list[Any]:
        arrays = iter(xs)
        given = []
        for value, keys in held:
            given.append(dataclasses.replace(value, array=next(arrays), move=None))
            given[-1].copies.update((k, next(arrays)) for k in keys)
        made: dict[int, tuple[int, Any]] = {}

        def position(x: Any) -> int:
            return made.setdefault(id(x), (len(made), x))[0]

        for value in run(window, given):
            results.append(dataclasses.replace(value, array=position(value.array)))
            results[-1].copies.update((k, position(x)) for k, x in value.copies.items())
        for i in window.used_later:
            new = [(k, x) for k, x in given[i].copies.items() if k not in held[i][1]]
            copies.extend((i, k, position(x)) for k, x in new)
        return [x for _, x in made.values()]

    return _Traced(inlined_once(function, types), results, copies)
