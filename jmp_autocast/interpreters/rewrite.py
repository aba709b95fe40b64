"""jaxpr + `Plan` -> the same program with its casts; decides no dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax import lax

from .accumulation import accumulating_contraction
from .casts import Scalar, Value
from .compat import (
    Literal,
    Tracer,
    bind,
    body_of,
    consts_of,
    current_name_stack,
    equation_context,
    fresh_make_jaxpr,
    inlined,
    literal_value,
    mark_frames,
    with_dtype,
)
from .emit import cast, emit
from .plan import FLOAT_DTYPES, EquationPlan, Leaf, Plan, ValueState, float_dtype

mark_frames(__file__)

RewriteRule = Callable[["Rewriter", Any, EquationPlan, list[Any]], Sequence[Any]]

# Filled by the modules that hold one rule per structural primitive.
REWRITE_RULES: dict[str, RewriteRule] = {}


def rewrites(*names: str) -> Callable[[RewriteRule], RewriteRule]:
    """Registers the function that emits a structural primitive.

    It gets the rewriter, the equation, its plan and the operands as `Value` or `Scalar`, and
    returns the results as arrays.
    """

    def register(function: RewriteRule) -> RewriteRule:
        REWRITE_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def read(plan: EquationPlan, operands: list[Any]) -> list[Any]:
    """Returns the operands of an equation in the dtypes that its plan says."""
    return [value.read(dtype) for value, dtype in zip(operands, plan.operands, strict=True)]


class Rewriter:
    """Emits planned jaxprs: one instance per trace.

    Args:
        plan: Plans a jaxpr; used for the derivative rules of custom functions, which come into
            being only when JAX differentiates the rewritten program.
    """

    def __init__(self, plan: Callable[..., Plan]) -> None:
        self.plan = plan
        self.memo: dict[Any, Any] = {}

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
            args: Its arguments, in the dtypes that the plan's inputs say.
            copies: 16-bit copies of arguments that were made outside, by (argument, dtype).

        Returns:
            The outputs, in the dtypes that the plan's outputs say.
        """
        body = plan.jaxpr
        env: dict[Any, Any] = {}
        for v, x, state in zip(body.constvars, consts, plan.consts, strict=True):
            env[v] = Value(x, is_leaf(state))
        for v, x, state in zip(body.invars, args, plan.inputs, strict=True):
            env[v] = Value(x, is_leaf(state))
        for (i, dtype), copy in copies.items():
            env[body.invars[i]].copies[dtype] = copy
        for eqn, equation in zip(body.eqns, plan.equations, strict=True):
            operands = [
                Scalar(literal_value(v)) if isinstance(v, Literal) else env[v] for v in eqn.invars
            ]
            with equation_context(eqn):
                results = self.emit_equation(eqn, equation, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        outputs = []
        for v, dtype in zip(body.outvars, plan.output_dtypes, strict=True):
            value = Scalar(literal_value(v)) if isinstance(v, Literal) else env[v]
            outputs.append(value.read(dtype))
        return outputs

    def emit_equation(self, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Value]:
        """Binds one planned equation in the ambient trace.

        Args:
            eqn: The equation.
            plan: Its plan.
            operands: Its operands, as `Value` or `Scalar`.

        Returns:
            Its results.
        """
        if plan.moves_leaf:
            return self._move(eqn, plan, operands)
        rule = REWRITE_RULES.get(eqn.primitive.name)
        if rule is None or plan.opaque or plan.keep:
            results = self._bind(eqn, plan, operands)
        else:
            results = rule(self, eqn, plan, operands)
        if plan.casts:
            results = [
                x if d is None else cast(x, d) for x, d in zip(results, plan.casts, strict=True)
            ]
        return [Value(x, is_leaf(s)) for x, s in zip(results, plan.results, strict=True)]

    def _bind(self, eqn: Any, plan: EquationPlan, operands: list[Any]) -> Sequence[Any]:
        if plan.accumulates:
            return [_accumulated(eqn, plan, operands)]
        arrays = read(plan, operands)
        for i in plan.replicates:
            arrays[i] = operands[i].replicated(plan.operands[i], _replication(eqn))
        if plan.replicates and eqn.primitive.name == "broadcast_in_dim":
            return arrays
        if plan.redispatch:
            return [_REDISPATCH[eqn.primitive.name](*arrays, **_scatter_options(eqn.params))]
        params = {**eqn.params, **plan.params} if plan.params else eqn.params
        if eqn.effects:
            out = bind(eqn.primitive, arrays, params)
        else:
            out = emit(eqn.primitive, arrays, params)
        return out if eqn.primitive.multiple_results else [out]

    def _move(self, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Value]:
        """Data movement of a leaf: its 16-bit copy, if asked for, moves the operand's copy."""
        out = [value.array for value in operands]
        if eqn.params.get("new_dtype", plan.results[0].dtype) != plan.results[0].dtype:
            results = out  # a change of weak type, of a value that is in another dtype
        else:
            results = emit(eqn.primitive, out, eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        moved: dict[Any, Sequence[Any]] = {}
        # The copy is made when it is first read, in the scopes of the reader.
        stack = current_name_stack()

        def copy_of(k: int) -> Callable[[Any], Any]:
            def copy(dtype: Any) -> Any:
                if dtype not in moved:
                    with equation_context(eqn, stack):
                        moved[dtype] = _moved_copies(eqn, operands, dtype)
                return moved[dtype][k]

            return copy

        return [
            Value(x, is_leaf(s), copy_of(k))
            for k, (x, s) in enumerate(zip(results, plan.results, strict=True))
        ]

    def jaxpr(
        self, plan: Plan, closed: Any, copies: Sequence[tuple[int, Any]] = (), at: int = 0
    ) -> Any:
        """Returns the rewritten jaxpr of a planned one, made once per plan.

        Args:
            plan: The plan.
            closed: The jaxpr it was made for.
            copies: Pairs (input, dtype): the 16-bit copies that come as further arguments.
            at: The number of arguments before them.
        """
        key = (id(plan), tuple(copies))
        if key not in self.memo:
            avals = [
                with_dtype(v.aval, s.dtype) if s.dtype is not None else v.aval
                for v, s in zip(plan.jaxpr.invars, plan.inputs, strict=True)
            ]
            end = at + len(copies)

            def body(*xs: Any) -> list[Any]:
                given = dict(zip(copies, xs[at:end], strict=True))
                return self.evaluate(plan, consts_of(closed), (*xs[:at], *xs[end:]), given)

            extra = [with_dtype(avals[i], dtype) for i, dtype in copies]
            self.memo[key] = fresh_make_jaxpr(body, *avals[:at], *extra, *avals[at:])
        return self.memo[key]

    def run(self, closed: Any, args: Sequence[Any], wanted: Sequence[Any], path: Any) -> list[Any]:
        """Plans and emits a jaxpr that came into being while rewriting.

        Args:
            closed: The jaxpr, traced in declared dtypes.
            args: Its arguments, in the dtypes they have.
            wanted: What is asked of each output.
            path: The enclosing scopes.
        """
        states = [_state_of(v, x) for v, x in zip(body_of(closed).invars, args, strict=True)]
        plan = self.plan(closed, states, wanted, path)
        return self.evaluate(plan, consts_of(closed), args)


def _accumulated(eqn: Any, plan: EquationPlan, operands: list[Any]) -> Any:
    factors = [value.factor(d) for value, d in zip(operands, plan.operands, strict=True)]
    return accumulating_contraction(
        eqn.primitive,
        eqn.params,
        *(low for low, _ in factors),
        out=plan.results[0].dtype,
        full=(factors[0][1], factors[1][1]),
    )


def _replication(eqn: Any) -> Callable[[Any], Any]:
    """Returns the function that brings an operand to the size of the result."""
    if eqn.primitive.name == "broadcast_in_dim":
        return lambda x: emit(eqn.primitive, [x], eqn.params)
    aval = eqn.outvars[0].aval
    # The spec of an aval names explicit mesh axes only; without one, JAX decides.
    return _broadcast_to(aval.shape, aval.sharding if any(aval.sharding.spec) else None)


@functools.lru_cache(maxsize=4096)
def _broadcast_to(shape: tuple[int, ...], sharding: Any) -> Callable[[Any], Any]:
    """Broadcasts by a function of its own per shape: JAX then caches its derivative, see `emit`."""

    def broadcast(x: Any) -> Any:
        dims = tuple(range(x.ndim)) if x.ndim == len(shape) else ()
        return lax.broadcast_in_dim(x, shape, dims, out_sharding=sharding)

    inline = inlined(broadcast)
    return lambda x: inline(x) if isinstance(x, Tracer) else broadcast(x)


def _state_of(var: Any, x: Any) -> ValueState:
    return ValueState(None if float_dtype(var.aval) is None else x.dtype)


def is_leaf(state: ValueState) -> bool:
    """True for a value whose 16-bit reads are views, which keep its gradient in float32."""
    return state.leaf is not None and state.leaf is not Leaf.LITERAL and state.known is None


def _moved_copies(eqn: Any, operands: list[Any], dtype: Any) -> Sequence[Any]:
    if eqn.primitive.name == "convert_element_type":
        # A number cast to float32 is cast to 16 bits directly.
        value = operands[0]
        x = value.copy(dtype) if _is_float(value) else value.array
        return [cast(x, dtype)]
    arrays = [value.copy(dtype) if _is_float(value) else value.array for value in operands]
    if eqn.primitive.name == "sharding_constraint":
        # Or XLA gives the cast the new sharding, and moves float32 between devices.
        arrays = lax.optimization_barrier(arrays)
    out = emit(eqn.primitive, arrays, eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def _is_float(value: Any) -> bool:
    array = value.array
    return isinstance(array, float) or getattr(array, "dtype", None) in FLOAT_DTYPES


def _scatter_options(params: dict[str, Any]) -> dict[str, Any]:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return {name: params[name] for name in names}


_REDISPATCH: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}
