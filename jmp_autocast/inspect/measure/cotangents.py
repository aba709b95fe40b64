"""Cotangents of what equations make: how a backward pass goes wrong, value by value.

To each result a zero is added that is differentiated: its gradient is the result's cotangent.
Calls are entered. Loops, branches and functions with a derivative rule of their own are not, and
count as one equation each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...interpreters import Plan, Rewriter
from ...interpreters.compat import (
    Literal,
    bind,
    body_of,
    consts_of,
    equation_context,
    literal_value,
    scope_names,
    source_line,
)
from ...interpreters.plan.data import Move
from ...interpreters.rewrite.values import Scalar, Value
from ...policies import CALLS
from ...scopes import read_mark
from .measured import Site, bodies_of, is_measured

_ENTERED = CALLS - {"remat2", "checkpoint", "remat_opt"}


class Tap(NamedTuple):
    """A value whose cotangent is asked for.

    Args:
        site: The equation that makes it.
        sources: The positions of the taps that it is computed from.
    """

    site: Site
    sources: frozenset[int]


class _Tapped(NamedTuple):
    """A value of the running program.

    Args:
        value: The value.
        taps: The taps that it is, or is moved from.
    """

    value: Any
    taps: frozenset[int]


class Tapper:
    """Runs a program with a zero added to each result that an equation makes.

    Args:
        zeros: The zeros, one per tap; None to find the taps.
        rewriter: Emits planned equations; None to run the program as it was traced.
    """

    def __init__(self, zeros: Sequence[Any] | None, rewriter: Rewriter | None) -> None:
        self._zeros = zeros
        self._rewriter = rewriter
        self.taps: list[Tap] = []
        self.avals: list[Any] = []

    def run(self, closed: Any, plan: Plan, arrays: Sequence[Any]) -> list[Any]:
        """Runs a whole program.

        Args:
            closed: The jaxpr.
            plan: Its plan, which the program as it was traced does not look at.
            arrays: The arguments.
        """
        states = plan.inputs if self._rewriter else (None,) * len(arrays)
        args = [
            _Tapped(_leaf_value(x, state), frozenset())
            for x, state in zip(arrays, states, strict=True)
        ]
        planned = plan if self._rewriter else None
        return [each.value.array for each in self._walk(closed, planned, args, ())]

    def _walk(
        self, jaxpr: Any, plan: Plan | None, args: Sequence[_Tapped], names: tuple[str, ...]
    ) -> list[_Tapped]:
        body = body_of(jaxpr)
        const_states = plan.consts if plan else (None,) * len(body.constvars)
        consts = [
            _Tapped(_leaf_value(x, state), frozenset())
            for x, state in zip(consts_of(jaxpr), const_states, strict=True)
        ]
        env = dict(zip([*body.constvars, *body.invars], [*consts, *args], strict=True))

        def look_up(atom: Any) -> _Tapped:
            if isinstance(atom, Literal):
                return _Tapped(Scalar(literal_value(atom)), frozenset())
            return env[atom]

        for i, eqn in enumerate(body.eqns):
            operands = [look_up(v) for v in eqn.invars]
            path = (*names, *(name for name in scope_names(eqn) if read_mark(name) is None))
            with equation_context(eqn):
                results = self._equation(eqn, plan.equations[i] if plan else None, operands, path)
            env.update(zip(eqn.outvars, results, strict=True))
        outputs = [look_up(v) for v in body.outvars]
        if plan is None:
            return outputs
        return [
            _Tapped(Value(each.value.read(dtype)), each.taps)
            for each, dtype in zip(outputs, plan.output_dtypes, strict=True)
        ]

    def _equation(
        self, eqn: Any, plan: Any, operands: list[_Tapped], path: tuple[str, ...]
    ) -> list[_Tapped]:
        values = [each.value for each in operands]
        if eqn.primitive.name in _ENTERED and (plan is None or plan.inner):
            (jaxpr,) = bodies_of(eqn)
            if plan is None:
                return self._walk(jaxpr, None, operands, path)
            args = [
                _Tapped(_inner_value(each.value, dtype, state), each.taps)
                for each, dtype, state in zip(
                    operands, plan.operands, plan.inner[0].inputs, strict=True
                )
            ]
            return self._walk(jaxpr, plan.inner[0], args, path)
        sources = frozenset().union(*(each.taps for each in operands))
        if plan is None:
            out = bind(eqn.primitive, [value.array for value in values], eqn.params)
            results = [Value(x) for x in (out if eqn.primitive.multiple_results else [out])]
        else:
            assert self._rewriter is not None
            results = self._rewriter.emit_equation(eqn, plan, values)
        moved = plan is not None and isinstance(plan.action, Move)
        return [
            _Tapped(value, sources) if moved else self._tapped(value, v.aval, eqn, sources, path)
            for value, v in zip(results, eqn.outvars, strict=True)
        ]

    def _tapped(
        self, value: Value, aval: Any, eqn: Any, sources: frozenset[int], path: tuple[str, ...]
    ) -> _Tapped:
        # Without a tap before it, it is computed from constants and arguments that are moved.
        if not is_measured(aval) or value.source or not jnp.issubdtype(aval.dtype, jnp.floating):
            return _Tapped(value, sources)
        position = len(self.taps)
        site = Site(
            scope="/".join(path),
            source=source_line(eqn),
            primitive=eqn.primitive.name,
            inside=(),
            backward=True,
            shapes=(tuple(aval.shape),),
            dtypes=(aval.dtype.name,),
        )
        self.taps.append(Tap(site, sources))
        self.avals.append(jax.typeof(value.array))
        if self._zeros is not None:
            value = Value(value.array + self._zeros[position])
        return _Tapped(value, frozenset((position,)))


def cotangents(
    closed: Any, plan: Plan, rewriter: Rewriter | None, arrays: Sequence[Any], wrt: Sequence[int]
) -> tuple[list[Tap], list[Any], list[Any]]:
    """Returns the taps of a program, their cotangents, and the gradients of arguments.

    Args:
        closed: The jaxpr of a function whose first output is a scalar float.
        plan: Its plan.
        rewriter: Emits planned equations; None for the program as it was traced.
        arrays: The arguments.
        wrt: The positions of the arguments whose gradients are asked for.
    """
    finder = Tapper(None, rewriter)
    jax.eval_shape(lambda *xs: finder.run(closed, plan, xs), *arrays)
    zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in finder.avals]

    def scalar(zeros: Sequence[Any], chosen: Sequence[Any]) -> Any:
        given = list(arrays)
        for i, x in zip(wrt, chosen, strict=True):
            given[i] = x
        return Tapper(zeros, rewriter).run(closed, plan, given)[0]

    gradient: Callable[..., Any] = jax.grad(scalar, argnums=(0, 1))
    made, gradients = gradient(zeros, [arrays[i] for i in wrt])
    return finder.taps, made, gradients


def _leaf_value(x: Any, state: Any) -> Value:
    return Value(x, state.keeps_gradient) if state is not None else Value(x)


def _inner_value(value: Any, dtype: Any, state: Any) -> Value:
    """What a call hands on: its inside makes 16-bit copies of a leaf from the leaf itself."""
    return Value(value.read(dtype), state.keeps_gradient)
