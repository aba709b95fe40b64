"""The backward sweep: what the consumers of a value ask of the equation that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..policies import CALLS, CONTRACTIONS, DATA_MOVEMENT, FLOAT32, Policy
from .compat import Literal, body_of, inner_jaxpr_key
from .plan import CUSTOM_RULES, Code, Demand, EquationPlan, Leaf, ValueState, Wanted
from .sizes import at_least, size

# Rounding commutes with these, so a consumer behind them is as good as a direct one.
_TRANSPARENT = DATA_MOVEMENT | frozenset(
    """
    neg abs sign max min clamp reduce_max reduce_min cummax cummin select_n concatenate stack pad
    dynamic_update_slice sort optimization_barrier convert_element_type
    """.split()
)

# Cheap arithmetic. In float32 it costs a fused cast and keeps what the consumer would lose:
# `x - max` before exp, scale and mask before softmax, square before a sum, an update added to a
# parameter. The maxima are here because their transposes count ties in the operand's dtype.
_FEEDERS = frozenset(
    "add add_any sub mul div rem square integer_pow atan2 reduce_max reduce_min".split()
)

_CHEAP = _FEEDERS | _TRANSPARENT

_LOW_CONTRACTION = (Code.LOWER_PRECISION, Code.DOT_OUT)

# Rounding before one of these gives what rounding after it gives. What replicates is not among
# them: its transpose sums, and would sum in 16 bits.
_CLEAR = (DATA_MOVEMENT | frozenset("neg abs max min clamp pad select_n".split())) - frozenset(
    "broadcast_in_dim broadcast_to tile gather".split()
)

_OUTPUT = "the output"

# They share their outputs with the one jaxpr that they hold.
_HOLDING_ONE = CALLS | CUSTOM_RULES | {"scan", "shard_map"}

_SUMMING = frozenset(("add", "add_any", _OUTPUT))

_NO_WISH = Wanted()

SATURATING = frozenset(("logistic", "tanh"))


def find_requests(
    body: Any,
    equations: Sequence[EquationPlan],
    states: Mapping[Any, ValueState],
    wanted: Sequence[Wanted],
    already: dict[int, tuple[Wanted, ...]],
    policy: Policy,
) -> tuple[dict[int, tuple[Wanted, ...]], tuple[Demand, ...]]:
    """Finds the equations that should run in the dtype in which all their consumers read.

    Args:
        body: The jaxpr.
        equations: The plan of each equation.
        states: What is known of each value.
        wanted: What is asked of each output.
        already: What an earlier sweep found.
        policy: Where the program's inputs have no vote, a sum of two values stays in 16 bits, or
            the last norm of a network would raise the whole residual stream before it. It also
            says whether a contraction may hand out its accumulator.

    Returns:
        For the index of an equation, what is asked of each of its results; and how the equations,
        if they follow, read each input of the jaxpr.
    """
    requests = {}
    asked = frozenset(k for k, want in enumerate(wanted) if want.guarded)
    guarded = _reaching_logarithm(body, asked, {})
    demands = _Demands(body, wanted, guarded)
    for i in range(len(equations) - 1, -1, -1):
        eqn, plan = body.eqns[i], equations[i]
        request = demands.request(eqn, plan) if i not in already else None
        if request is not None:
            computed = {v for v in _variables(eqn.invars) if _is_computed(states[v])}
            stays = policy.data_abstains and _is_residual_sum(eqn, states)
            stays |= len(computed) > 1 and _is_summand(eqn, plan, demands.beyond_sums)
            if not stays and _can_follow(policy, eqn, plan, request, guarded, len(computed)):
                requests[i] = request
        demands.add(eqn, plan, requests.get(i))
    return requests, demands.of_inputs()


def input_demands(
    body: Any, equations: Sequence[EquationPlan], wanted: Sequence[Wanted]
) -> tuple[Demand, ...]:
    """Returns how the equations of a jaxpr read each of its inputs."""
    demands = _Demands(body, wanted)
    for eqn, plan in zip(reversed(body.eqns), reversed(equations), strict=True):
        demands.add(eqn, plan)
    return demands.of_inputs()


def leaf_copies(
    body: Any, equations: Sequence[EquationPlan], seeds: dict[Any, ValueState]
) -> tuple[tuple[int, np.dtype], ...]:
    """Returns the inputs of a jaxpr that are leaves and are read in a 16-bit dtype, with it."""
    roots = {
        v: i
        for i, v in enumerate(body.invars)
        if seeds[v].leaf not in (None, Leaf.LITERAL) and seeds[v].known is None
    }
    copies: dict[tuple[int, np.dtype], None] = {}
    for eqn, plan in zip(body.eqns, equations, strict=True):
        if plan.moves_leaf:
            root = next((roots[v] for v in eqn.invars if _is_in(v, roots)), None)
            if root is not None:
                roots.update((v, root) for v in eqn.outvars)
            continue
        for v, dtype in zip(eqn.invars, plan.operands, strict=True):
            if dtype is not None and dtype != FLOAT32 and _is_in(v, roots):
                copies.setdefault((roots[v], dtype))
        for i, dtype in plan.low_copies:
            if _is_in(eqn.invars[i], roots):
                copies.setdefault((roots[eqn.invars[i]], dtype))
    return tuple(copies)


def _is_in(atom: Any, variables: dict[Any, Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


class _Demands:
    """How each value is read by the equations seen so far, from the last backwards.

    Args:
        body: The jaxpr.
        wanted: What is asked of each output.
        guarded: The variables that reach a logarithm or a denominator.
    """

    def __init__(
        self, body: Any, wanted: Sequence[Wanted], guarded: frozenset[Any] = frozenset()
    ) -> None:
        self._inputs = body.invars
        self._guarded = guarded
        self._of: dict[Any, Demand] = {}
        self._reader: dict[Any, str] = {}  # the first in program order
        self.beyond_sums: set[Any] = set()  # what others than sums and the caller read
        for v, want in zip(body.outvars, wanted, strict=True):
            if isinstance(v, Literal):
                continue
            if want.dtype is not None:
                self._read(v, Demand.of(want.dtype), _OUTPUT)
            elif want.demand:
                self._read(v, want.demand, want.reader)
            else:
                # Whoever reads it outside is not known here: no reason to change it.
                self._read(v, Demand.LOW | Demand.FULL, "")

    def _read(self, v: Any, demand: Demand, reader: str) -> None:
        before = self._of.get(v)
        if before is not demand:  # an `|` of flags is slow
            self._of[v] = demand if before is None else before | demand
        self._reader[v] = reader
        if reader not in _SUMMING:
            self.beyond_sums.add(v)

    def of_inputs(self) -> tuple[Demand, ...]:
        """Returns how each input is read."""
        return tuple(self._of.get(v, Demand.NONE) for v in self._inputs)

    def request(self, eqn: Any, plan: EquationPlan) -> tuple[Wanted, ...] | None:
        """Returns what to ask of an equation's results, None if they are as their readers want."""
        pairs = zip(eqn.outvars, plan.results, strict=True)
        asked = tuple([self._wish(v, state) for v, state in pairs])
        return None if all([want is _NO_WISH for want in asked]) else asked

    def _wish(self, v: Any, state: ValueState) -> Wanted:
        if state.dtype is None or state.leaf is not None:
            return _NO_WISH
        demand = self._of.get(v)
        if demand not in (Demand.LOW, Demand.FULL) or demand is Demand.of(state.dtype):
            return _NO_WISH
        return Wanted(demand=demand, guarded=v in self._guarded, reader=self._reader[v])

    def add(self, eqn: Any, plan: EquationPlan, request: tuple[Wanted, ...] | None = None) -> None:
        """Adds how an equation reads its operands, if it follows the request."""
        name = eqn.primitive.name
        demand = self._demand(eqn, plan, request)
        for k, v in enumerate(eqn.invars):
            if not isinstance(v, Literal):
                self._read(v, plan.demands[k] if plan.demands else demand, name)

    def _demand(self, eqn: Any, plan: EquationPlan, request: tuple[Wanted, ...] | None) -> Demand:
        if eqn.primitive.name in CONTRACTIONS and plan.reason.code in _LOW_CONTRACTION:
            return Demand.LOW
        if request is not None:
            return next(want.demand for want in request if want.demand)
        if all(state.dtype is None for state in plan.results):
            # A comparison or an index: exact enough in either dtype.
            kept = plan.reason.code in (Code.KEEP, Code.UNKNOWN)
            return Demand.FULL if kept else Demand.NONE
        if plan.results[0].dtype == FLOAT32:
            return Demand.FULL
        if eqn.primitive.name not in _TRANSPARENT:
            return Demand.LOW
        through = Demand.NONE
        for out in eqn.outvars:
            through |= self._of.get(out, Demand.NONE)
        return through or Demand.LOW


def _can_follow(
    policy: Policy,
    eqn: Any,
    plan: EquationPlan,
    request: tuple[Wanted, ...],
    guarded: frozenset[Any],
    computed: int,
) -> bool:
    if plan.inner:
        return True
    name, code = eqn.primitive.name, plan.reason.code
    if any(want.demand is Demand.LOW for want in request):
        # Of two computed operands each would need a cast, where the result needs one; a row of a
        # buffer is smaller than the buffer.
        clear = name in _CLEAR and not _shrinks(eqn)
        return code is Code.PROMOTE_FULL and clear and computed == 1
    if plan.accumulates:
        return policy.dot_output == "consumer" and code is Code.LOWER_PRECISION
    return code is Code.PROMOTE_LOW and (name in _FEEDERS or _is_guarded(eqn, guarded))


def _is_computed(state: ValueState) -> bool:
    return state.dtype is not None and state.leaf is None


def _shrinks(eqn: Any) -> bool:
    results = sum(map(size, eqn.outvars))
    return not all(at_least(results, size(v)) for v in _variables(eqn.invars))


def _is_summand(eqn: Any, plan: EquationPlan, beyond_sums: set[Any]) -> bool:
    """A product that only sums or the caller read: a gated input of an LSTM, a last silu.

    Its backward pass reads both factors: raised, it would keep both in float32.
    """
    if eqn.primitive.name != "mul" or plan.reason.code is not Code.PROMOTE_LOW:
        return False
    return eqn.outvars[0] not in beyond_sums


def _is_residual_sum(eqn: Any, states: Mapping[Any, ValueState]) -> bool:
    if eqn.primitive.name not in ("add", "add_any"):
        return False
    shape = eqn.outvars[0].aval.shape
    summands = [states[v].leaf for v in _variables(eqn.invars) if v.aval.shape == shape]
    return len(summands) > 1 and all(leaf in (None, Leaf.DATA) for leaf in summands)


def _is_guarded(eqn: Any, guarded: frozenset[Any]) -> bool:
    return eqn.primitive.name in SATURATING and eqn.outvars[0] in guarded


def _reaching_logarithm(
    body: Any, outputs: frozenset[int], memo: dict[Any, frozenset[Any]]
) -> frozenset[Any]:
    """The variables that reach a logarithm or a denominator through cheap operations and calls.

    What saturates there needs float32: in 16 bits a sigmoid of 12 is 1, and log(1 - 1) infinite.

    Args:
        body: The jaxpr.
        outputs: Which of its outputs reach one outside.
        memo: What is known already: a layer may be called many times.
    """
    if (id(body), outputs) in memo:
        return memo[id(body), outputs]
    reaching = set(_variables([body.outvars[k] for k in outputs]))
    for eqn in reversed(body.eqns):
        name = eqn.primitive.name
        if name in ("log", "log1p", "log2", "rsqrt", "pow"):
            reaching.update(_variables(eqn.invars[:1]))
        elif name == "div":
            reaching.update(_variables(eqn.invars[1:]))
        if name in _CHEAP and not reaching.isdisjoint(eqn.outvars):
            reaching.update(_variables(eqn.invars))
        for inner, operands in _held(eqn):
            found = frozenset(k for k, v in enumerate(eqn.outvars) if v in reaching)
            within = _reaching_logarithm(inner, found, memo)
            pairs = zip(operands, inner.invars, strict=True)
            reaching.update(_variables([v for v, given in pairs if given in within]))
    memo[id(body), outputs] = frozenset(reaching)
    return memo[id(body), outputs]


def _held(eqn: Any) -> list[tuple[Any, Sequence[Any]]]:
    """The jaxprs that share their outputs with an equation, each with its operands."""
    name, params = eqn.primitive.name, eqn.params
    if name in _HOLDING_ONE:
        return [(body_of(params[inner_jaxpr_key(params)]), eqn.invars)]
    if name == "cond":
        return [(body_of(branch), eqn.invars[1:]) for branch in params["branches"]]
    return []


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]
