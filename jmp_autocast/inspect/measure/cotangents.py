"""Cotangents of what equations make: how a backward pass goes wrong, value by value.

A zero is added to each result, and the program is differentiated by the zeros: the gradient of a
zero is the cotangent of its result. Calls are entered. Loops, branches and functions with a
derivative rule of their own are not, and count as one equation each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...interpreters.compat import consts_of, literal_value, source_line
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import bodies
from ...interpreters.rewrite.values import Scalar, Value
from ...policies import CALLS
from .measured import MeasuredEquation, described, is_measurable, user_scopes
from .programs import Program

# A checkpoint is a call, too, but its equations run again in the backward pass: a zero added inside
# would be one of its residuals, and the program would no longer be the one that trains.
_ENTERED = CALLS - {"remat2", "checkpoint", "remat_opt"}


class Tap(NamedTuple):
    """A value whose cotangent is asked for.

    Args:
        equation: The equation that makes it.
        sources: The positions of the taps that it is computed from.
    """

    equation: MeasuredEquation
    sources: frozenset[int]


class _Tapped(NamedTuple):
    """A value of the running program.

    Args:
        value: The value: an array between jaxprs, a `Value` or `Scalar` inside one.
        taps: The taps that it is, or is moved from.
    """

    value: Any
    taps: frozenset[int] = frozenset()


class Tapper:
    """Runs a program with a zero added to each result that an equation makes.

    Args:
        zeros: The zeros, one per tap; None to find the taps.
    """

    def __init__(self, zeros: Sequence[Any] | None = None) -> None:
        self._zeros = zeros
        self.taps: list[Tap] = []
        self.avals: list[Any] = []

    def run(self, closed: Any, program: Program, arrays: Sequence[Any]) -> list[Any]:
        """Runs a whole program, and returns its outputs.

        Args:
            closed: The jaxpr.
            program: How its equations are run.
            arrays: The arguments.
        """
        outputs = self._jaxpr(closed, program, [_Tapped(x) for x in arrays], ())
        return [each.value for each in outputs]

    def _jaxpr(
        self, jaxpr: Any, program: Program, args: Sequence[_Tapped], names: tuple[str, ...]
    ) -> list[_Tapped]:
        consts = [_Tapped(value) for value in program.constants(consts_of(jaxpr))]
        values = _with_arrays(args, program.arguments([each.value for each in args]))

        def step(i: int, eqn: Any, operands: list[_Tapped]) -> list[_Tapped]:
            path = (*names, *user_scopes(eqn))
            run = self._call if eqn.primitive.name in _ENTERED else self._equation
            return run(i, eqn, program, operands, path)

        outputs = evaluate(jaxpr, consts, values, lambda v: _Tapped(Scalar(literal_value(v))), step)
        return _with_arrays(outputs, program.outputs([each.value for each in outputs]))

    def _call(
        self, i: int, eqn: Any, program: Program, operands: list[_Tapped], path: tuple[str, ...]
    ) -> list[_Tapped]:
        """Runs what is inside a call."""
        (body,), (inner,) = bodies(eqn), program.inner(i, eqn)
        args = _with_arrays(operands, program.enter(i, [each.value for each in operands]))
        outputs = self._jaxpr(body.jaxpr, inner, args, path)
        results = program.leave(i, [each.value for each in outputs])
        return _with_arrays(outputs, [Value(x) for x in results])

    def _equation(
        self, i: int, eqn: Any, program: Program, operands: list[_Tapped], path: tuple[str, ...]
    ) -> list[_Tapped]:
        """Runs one equation, and taps what it makes."""
        sources = frozenset().union(*(each.taps for each in operands))
        results = program.emit(i, eqn, [each.value for each in operands])
        # An input or a constant that is only moved has no tap: with a zero added it would be a
        # computed value, and the gradients of its 16-bit copies would be added in 16 bits.
        return [
            _Tapped(x, sources)
            if program.is_source(i, k)
            else self._tapped(x, v.aval, eqn, sources, path)
            for k, (x, v) in enumerate(zip(results, eqn.outvars, strict=True))
        ]

    def _tapped(
        self, value: Value, aval: Any, eqn: Any, sources: frozenset[int], path: tuple[str, ...]
    ) -> _Tapped:
        if not is_measurable(aval) or not jnp.issubdtype(aval.dtype, jnp.floating):
            return _Tapped(value, sources)
        position = len(self.taps)
        equation = described(eqn.primitive.name, [aval], path, (), True, source_line(eqn))
        self.taps.append(Tap(equation, sources))
        self.avals.append(jax.typeof(value.array))
        if self._zeros is not None:
            value = Value(value.array + self._zeros[position])
        return _Tapped(value, frozenset((position,)))


def cotangents(
    closed: Any, program: Program, arrays: Sequence[Any], wrt: Sequence[int]
) -> tuple[list[Tap], list[Any], list[Any]]:
    """Returns the taps of a program, their cotangents, and the gradients of arguments.

    Args:
        closed: The jaxpr of a function whose first output is a scalar float.
        program: How its equations are run.
        arrays: The arguments.
        wrt: The positions of the arguments whose gradients are asked for.
    """
    finder = Tapper()
    jax.eval_shape(lambda *xs: finder.run(closed, program, xs), *arrays)
    zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in finder.avals]

    def scalar(zeros: Sequence[Any], chosen: Sequence[Any]) -> Any:
        given = list(arrays)
        for i, x in zip(wrt, chosen, strict=True):
            given[i] = x
        return Tapper(zeros).run(closed, program, given)[0]

    gradient: Callable[..., Any] = jax.grad(scalar, argnums=(0, 1))
    made, gradients = gradient(zeros, [arrays[i] for i in wrt])
    return finder.taps, made, gradients


def _with_arrays(values: Sequence[_Tapped], arrays: Sequence[Any]) -> list[_Tapped]:
    return [_Tapped(x, each.taps) for x, each in zip(arrays, values, strict=True)]
