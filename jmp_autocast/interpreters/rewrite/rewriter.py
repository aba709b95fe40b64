"""Emits a jaxpr with the casts of its `Plan`, and decides no dtype itself.

The equations are bound one after the other in the ambient trace, so that `grad`, `vmap` and `jit`
around `autocast` see ordinary equations.

A *source* is a value such as a parameter. Each of its copies has a key: a dtype, or an encoding
such as float8.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ...policies import FLOAT32
from ..after.copies import Copies, read_often
from ..compat import (
    AnyJaxpr,
    JaxprEqn,
    aval_of,
    bind,
    body_of,
    consts_of,
    fresh_make_jaxpr,
    function_name,
    is_checked,
    is_computed_now,
    literal_value,
    mark_frames,
    may_change,
    named_in_errors,
    with_dtype,
    without_nan_checks,
)
from ..compat.settings import jit_is_disabled
from ..plan.avals import float_dtype
from ..plan.copies import CopyKey, copy_aval
from ..plan.data import (
    Bind,
    Cast,
    Contract,
    Emit,
    EquationPlan,
    Inside,
    Move,
    Plan,
    Redispatch,
    Request,
    Stored,
    ValueState,
)
from ..plan.picked_first import picked_first
from ..plan.planner import Planner
from ..primitives.accumulate import accumulating_contraction, is_lowered_by_us
from ..primitives.cached_bind import bind_cached, cast
from ..primitives.evaluate import as_function, evaluate
from ..primitives.reading import cast_dtype, redispatched
from ..primitives.structure import bodies, called, has_rule, is_plain_call
from ..primitives.traits import having
from ..regions import AS_DECLARED
from .closures import KeepsValues
from .emitted import emitted
from .moves import moved
from .repeated_windows import Steps, Window, emit_window, repeated_windows
from .rewritten_bodies import make_innermost_first
from .values import REPEATS, Scalar, Value, as_array, read, replication

mark_frames(__file__)

RewritingRule = Callable[["Rewriter", Any, EquationPlan, list[Any]], Sequence[Any]]

# The modules with the rules of higher-order primitives fill this table.
REWRITING_RULES: dict[str, RewritingRule] = {}


def rewrites(*names: str) -> Callable[[RewritingRule], RewritingRule]:
    """Registers the function that emits a higher-order primitive around its rewritten bodies.

    The function takes the rewriter, the equation, its plan and the operands, each a `Value` or
    `Scalar`. It returns the results as arrays.
    """

    def register(function: RewritingRule) -> RewritingRule:
        REWRITING_RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclasses.dataclass(eq=False)
class Rewriter(KeepsValues):
    """Emits planned jaxprs; each trace has its own instance.

    Args:
        planner: Plans the derivative rules of custom functions, which exist only when JAX
            differentiates the rewritten program.
        planned: Called with the plan of each such rule before it is emitted; None for no callback.
        label: Returns the scope name of the equations that are emitted for a plan; None for no
            scope.
    """

    planner: Planner
    planned: Callable[[Plan], None] | None = None
    label: Callable[[EquationPlan], str] | None = None
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    known_copies: dict[int, Copies] = dataclasses.field(default_factory=dict, init=False)
    # The ids of the plans that belong to one equation only. The derivative of such an equation is
    # not cached, because no other equation could use it.
    once: set[int] = dataclasses.field(default_factory=set, init=False)

    def program(self, plan: Plan, closed: AnyJaxpr, args: Sequence[Any]) -> list[Any]:
        """Runs a planned program. Derivative rules may close over any of its values.

        Args:
            plan: The plan.
            closed: The closed jaxpr of the plan, which is run once.
            args: As for `evaluate`.
        """
        self.closed_over.look(closed)
        make_innermost_first(self, plan)
        return self.evaluate(plan, consts_of(closed), args)

    def evaluate(
        self,
        plan: Plan,
        consts: Sequence[Any],
        args: Sequence[Any],
        copies: Mapping[tuple[int, Any], Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Runs a planned jaxpr by binding its equations in the ambient trace.

        Args:
            plan: The plan.
            consts: The jaxpr's constants.
            args: Its arguments, in the dtypes of the plan's inputs.
            copies: Copies of arguments that the caller has made, by (argument, key).

        Returns:
            The outputs, in the dtypes of the plan's outputs.
        """
        # Each 16-bit read of a source is a `source_view` of its own. All views of a source share
        # one 16-bit copy, which its `Value` caches.
        given = list(map(Value.of, args, plan.inputs))
        for (i, dtype), copy in copies.items():
            given[i].copies[dtype] = copy
        outputs = self._evaluate(plan, consts, given)
        return [value.read(dtype) for value, dtype in zip(outputs, plan.output_dtypes, strict=True)]

    def _evaluate(self, plan: Plan, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        # Plans live as long as the rewriter, so that an id stays the id of one plan.
        is_flat = self._is_flat(given)
        if (key := ("steps", id(plan), is_flat)) not in self.memo:
            picked = picked_first(plan)
            often, jaxpr, steps = read_often(picked), picked.jaxpr, picked.equations
            if not is_flat:
                jaxpr, steps = repeated_windows(picked, often, self.closed_over.rule_of)
                self.once.update(i for i, n in Counter(map(id, steps)).items() if n == 1)
            self.memo[key] = jaxpr, steps, often
        jaxpr, steps, often = self.memo[key]
        held = list(map(Value.of, consts, plan.consts))
        self.closed_over.keep((*jaxpr.constvars, *jaxpr.invars), (*held, *given))

        def run(jaxpr: Any, steps: Steps, held: Sequence[Any], given: Sequence[Any]) -> list[Value]:
            def step(i: int, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Value]:
                equation = steps[i]
                if isinstance(equation, Window):
                    return emit_window(equation, operands, run_window, self.memo)
                results = self._labeled(eqn, equation, operands)
                self.closed_over.keep(eqn.outvars, results)
                for v, value in zip(eqn.outvars, results, strict=True):
                    if v in often:
                        value.is_read_often()
                return results

            return evaluate(jaxpr, held, given, lambda v: Scalar(literal_value(v)), step)

        def run_window(window: Window, operands: Sequence[Any]) -> list[Value]:
            return run(window, window.plans, (), operands)

        return run(jaxpr, steps, held, given)

    def _is_flat(self, given: Sequence[Value]) -> bool:
        """Returns whether each equation is bound by itself, so that equal windows share no jaxpr.

        This is the case outside of `jit`, with JAX's debugging checks, with `label` or `planned`,
        and if a derivative rule closes over a value of the program.
        """
        is_watched = self.label or self.planned or is_checked() or self.closed_over.holds_any
        return (
            bool(is_watched)
            or jit_is_disabled()
            or all(is_computed_now(value.array) for value in given)
        )

    def _labeled(self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> list[Value]:
        with contextlib.ExitStack() as contexts:
            if self.label:
                contexts.enter_context(jax.named_scope(self.label(plan)))
            if is_checked():
                if is_plain_call(eqn) and not eqn.effects:
                    return self._opened(eqn, plan, operands)
                contexts.enter_context(_checked(eqn))
            return self.emit_equation(eqn, plan, operands)

    def _opened(self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> list[Value]:
        """Emits a call equation by equation, so that JAX checks the result of each."""
        if plan.inner:
            return self._inlined(eqn, plan, operands)
        results = as_function(called(eqn), _checked)(*read(plan, operands))
        return [Value.of(x, s) for x, s in zip(results, plan.results, strict=True)]

    def emit_equation(self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> list[Value]:
        """Binds one planned equation in the ambient trace.

        Args:
            eqn: The equation.
            plan: Its plan.
            operands: Its operands, each a `Value` or `Scalar`.

        Returns:
            Its results.
        """
        # The first three cases return each result as a `Value`, with its copies or a function that
        # makes them. All other actions return arrays.
        match plan.action:
            case Move():
                return moved(eqn, plan, operands)
            case Stored(keys):
                return [_stored(eqn, plan, operands, keys)]
            case Inside(inlined=True):
                return self._inlined(eqn, plan, operands)
            case _:
                results = self._emit(eqn, plan, operands)
        if plan.casts:
            results = [
                x if d is None else cast(x, d) for x, d in zip(results, plan.casts, strict=True)
            ]
        return [Value.of(x, s) for x, s in zip(results, plan.results, strict=True)]

    def _inlined(self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> list[Any]:
        """Emits the equations of a call inline, and returns each result as a `Value`."""
        (inner,), (body,) = plan.inner, bodies(eqn)
        pairs = zip(operands, plan.operands, inner.inputs, strict=True)
        given = [x if d is None else Value.of(x.read(d), state) for x, d, state in pairs]
        outputs = self._evaluate(inner, consts_of(body.jaxpr), given)
        # A result of the call is an array, even if the call returns a literal.
        return [
            x
            if d is None and isinstance(x, Value)
            else Value.of(jnp.asarray(x.read(d), d or aval_of(v).dtype), state)
            for v, x, d, state in zip(
                eqn.outvars, outputs, inner.output_dtypes, inner.outputs, strict=True
            )
        ]

    def _emit(self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> Sequence[Any]:
        """Emits the action of a plan, and returns the results as arrays."""
        if self.closed_over.by(eqn):
            plan = self._entered(eqn, plan)
        match plan.action:
            case Contract() as action:
                return [self._accumulated(eqn, plan, operands, action)]
            case Redispatch():
                return [redispatched(eqn, *read(plan, operands))]
            case Cast():
                (x,), dtype = read(plan, operands), plan.results[0].dtype
                target = cast_dtype(eqn) if dtype is None else dtype
                return [x if x.dtype == target else cast(x, target)]
            case Emit():
                return emitted(eqn, plan, operands)
            case Inside(unchanged=False):
                return REWRITING_RULES[eqn.primitive.name](self, eqn, plan, operands)
            case Inside() if has_rule(eqn) or self.looks_at(eqn):
                # The bodies do not change, but the derivative rule may.
                return REWRITING_RULES[eqn.primitive.name](self, eqn, plan, operands)
            case _:
                return self._bound(eqn, plan, operands)

    def _bound(self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> Sequence[Any]:
        """Binds an equation's primitive, after it broadcasts the operands that the plan names."""
        # Actions other than `Bind` (`Keep`, unchanged bodies) change no parameters of the equation.
        action = plan.action if isinstance(plan.action, Bind) else Bind()
        arrays = [
            x.copy(dtype or x.array.dtype) if i in action.replicates else x.read(dtype)
            for i, (x, dtype) in enumerate(zip(operands, plan.operands, strict=True))
        ]
        # The 16-bit operands that the plan names are broadcast here. Otherwise, JAX would insert a
        # broadcast whose transpose adds up in 16 bits.
        for i in action.replicates:
            if "axes" in eqn.params:  # counts the ties of a maximum in float32
                full = replication(eqn, arrays)(operands[i].read(FLOAT32))
                return [cast(full, arrays[i].dtype)]
            broadcast, is_bias = replication(eqn, arrays), i in action.biases
            arrays[i] = operands[i].replicated(arrays[i], broadcast, is_bias)
        if action.replicates and eqn.primitive.name in REPEATS:
            return arrays[:1]
        params = {**eqn.params, **action.params} if action.params else eqn.params
        ours = is_lowered_by_us(eqn.primitive, arrays, params)
        if ours and plan.results[0].dtype != aval_of(eqn.outvars[0]).dtype:
            # CPUs lack kernels for some forms of this product and of its transposes: `accumulate`
            # replaces it. A product that the program itself declares in bfloat16 is not replaced.
            low = arrays[0].dtype
            return [accumulating_contraction(eqn.primitive, params, *arrays, out=low)]
        # An equation with effects is bound without a cache, which would need hashes of all
        # parameters and lose the order of effects.
        is_plain = eqn.effects or id(plan) in self.once
        out = (bind if is_plain else bind_cached)(eqn.primitive, arrays, params)
        return out if eqn.primitive.multiple_results else [out]

    def _accumulated(
        self, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any], action: Contract
    ) -> Any:
        if action.of_sources:
            factors = [value.factor(d) for value, d in zip(operands, plan.operands, strict=True)]
        else:
            factors = [(x, None) for x in read(plan, operands)]
        return accumulating_contraction(
            eqn.primitive,
            {**eqn.params, **action.params},
            *(low for low, _ in factors),
            out=plan.results[0].dtype,
            full=(factors[0][1], factors[1][1]),
        )

    def _entered(self, eqn: JaxprEqn, plan: EquationPlan) -> EquationPlan:
        """Returns the equation's plan, with plans for its bodies added if they are missing.

        They are missing in a region of an inner `autocast`. There the bodies keep their dtypes, and
        only derivative rules change.
        """
        if isinstance(plan.action, Inside):
            return plan
        inner = []
        for held in bodies(eqn):
            body = body_of(held.jaxpr)
            states = [ValueState(float_dtype(v.aval)) for v in body.invars]
            requests = [Request()] * len(body.outvars)
            inner.append(self.planner.plan(held.jaxpr, states, requests, AS_DECLARED))
        return dataclasses.replace(plan, action=Inside(tuple(inner), unchanged=True))

    def looks_at(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation's rules are rewritten even if its body is unchanged."""
        reported = self.planned is not None and has_rule(eqn)
        return reported or self.closed_over.by(eqn)

    def jaxpr(
        self, plan: Plan, closed: AnyJaxpr, copies: Sequence[tuple[int, Any]] = (), at: int = 0
    ) -> Any:
        """Returns the rewritten jaxpr of a planned jaxpr, made once per plan.

        Args:
            plan: The plan.
            closed: The jaxpr of the plan.
            copies: Pairs (input, key) of the copies that the result takes as additional arguments.
            at: The position of the copies of arguments before it. Copies of later arguments, which
                are slices, come last.
        """
        key = (id(plan), tuple(copies))
        if key not in self.memo:
            # The jaxpr is traced for the dtypes of the plan, but with the mesh axes and shardings
            # of the declared types. An unchanged dtype keeps its weak type, because JAX 0.10 gives
            # the gradient of a scan's operand the declared type of the body.
            avals = [
                v.aval
                if s.dtype is None or s.dtype == aval_of(v).dtype
                else with_dtype(v.aval, s.dtype)
                for v, s in zip(plan.jaxpr.invars, plan.inputs, strict=True)
            ]
            check_immutable(closed, avals)
            types = dict(enumerate(avals))
            types |= {(i, k): copy_aval(avals[i], k, plan.inputs[i].tag) for i, k in copies}
            before, after = ([c for c in copies if (c[0] < at) is b] for b in (True, False))
            order = [*range(at), *before, *range(at, len(avals)), *after]

            def body(*xs: Any) -> list[Any]:
                given = dict(zip(order, xs, strict=True))
                args = [given.pop(i) for i in range(len(avals))]
                return self.evaluate(plan, consts_of(closed), args, given)

            self.memo[key] = fresh_make_jaxpr(body, *(types[k] for k in order))
        return self.memo[key]

    def run(
        self, closed: AnyJaxpr, args: Sequence[Any], requests: Sequence[Any], of: Plan
    ) -> list[Any]:
        """Plans and emits a user's derivative rule, which was traced during rewriting.

        Args:
            closed: The rule's jaxpr, traced in declared dtypes.
            args: Its arguments, in their current dtypes.
            requests: The requests for its outputs.
            of: The plan of the function that has the rule; its path is the rule's scope. The rule
                may be lowered even if the function has nothing to lower: a product of 8-bit
                integers, or a kernel with a backward pass in JAX.
        """
        closed = self.planner.prepare(self.closed_over.live(closed), of.path)
        variables = body_of(closed).invars
        args = [as_array(x, v.aval) for x, v in zip(args, variables, strict=True)]
        states = [
            ValueState(None if float_dtype(v.aval) is None else x.dtype)
            for v, x in zip(variables, args, strict=True)
        ]
        plan = self.planner.plan(closed, states, requests, of.path)
        if self.planned is not None:
            self.planned(plan)
        if plan.identity and not self.closed_over.look(closed):
            return as_function(closed)(*args)
        return self.program(plan, closed, args)


def check_immutable(closed: AnyJaxpr, avals: Sequence[Any]) -> None:
    """Raises an error for an input that a trace may change, such as a hijax variable of Flax.

    No jaxpr can be traced from the type of such an input, which does not describe its contents.

    Args:
        closed: The jaxpr inside of an equation.
        avals: The types for which its inputs would be traced.
    """
    for aval in avals:
        if may_change(aval):
            raise TypeError(
                f"autocast cannot rewrite {function_name(closed)}, which a jit, a loop or a branch "
                "calls with a value that a trace may change, such as a hijax variable of Flax. "
                "Pass what the variable holds, variable[...]."
            )


_MAKES_NO_NAN = (having("moves") | {"convert_element_type"}) - {"gather"}


@contextlib.contextmanager
def _checked(eqn: JaxprEqn) -> Iterator[None]:
    """Returns the context in which an equation is bound; a move or a cast gets no NaN check."""
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(named_in_errors(eqn))
        if eqn.primitive.name in _MAKES_NO_NAN:
            contexts.enter_context(without_nan_checks())
        if not bodies(eqn):
            # `jit` is enabled here. Then the broadcast of a NaN constant in a batching rule is part
            # of the equation's operation, and is not checked by itself.
            contexts.enter_context(jax.disable_jit(False))
        yield


# --- one function per action ----------------------------------------------------------------


def _stored(
    eqn: JaxprEqn, plan: EquationPlan, operands: list[Any], keys: Sequence[CopyKey]
) -> Value:
    """Binds the equation that decodes a parameter stored in another encoding, such as float8.

    The stored arrays, its operands, become copies of the result.
    """
    arrays = [value.array for value in operands]
    made = Value.of(bind(eqn.primitive, arrays, eqn.params), plan.results[0])
    made.copies |= dict(zip(keys, arrays, strict=True))
    return made
