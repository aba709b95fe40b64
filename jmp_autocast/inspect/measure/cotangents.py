"""The cotangents of the results of equations: the errors of a backward pass, value by value.

A zero is added to each result, and the program is differentiated with respect to the zeros: the
gradient of a zero is the cotangent of its result. Calls are inlined. Loops, branches and functions
with a derivative rule of their own count as one equation each.

A result that does not depend on the chosen arguments gets no zero. It has no cotangent in training,
and the zero would make it differentiable: Equinox functions without a rule for an operand reject
that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ...interpreters.compat import ClosedJaxpr, JaxprEqn
from ...interpreters.primitives.evaluate import of_positions
from ...interpreters.primitives.structure import runs_again
from ...interpreters.rewrite.values import Value
from ...policies import CALLS
from .devices import on_this_mesh
from .measured import Around, MeasuredEquation, described, is_differentiable
from .side_by_side import EqnContext, Program, SideBySide, Values, refs_of

# A cotangent belongs to the backward pass.
_BACKWARD = Around(backward=True)


class Tap(NamedTuple):
    """A value whose cotangent is measured.

    Args:
        equation: Its producer.
        sources: The positions of the taps that it depends on.
    """

    equation: MeasuredEquation
    sources: frozenset[int]


class Tapper(SideBySide[Around]):
    """Runs a program with a zero added to the results of its equations.

    Args:
        zeros: The zeros, by the position of the result among `taps`; None to find the
            differentiated results.

    Attributes:
        taps: All results that could have a cotangent.
        avals: Their avals.
        differentiated: The positions of those that JAX differentiates.
    """

    def __init__(self, zeros: Mapping[int, Any] | None = None) -> None:
        self._zeros = zeros
        self.taps: list[Tap] = []
        self.avals: list[Any] = []
        self.differentiated: set[int] = set()

    def outputs(self, closed: ClosedJaxpr, program: Program, arrays: Sequence[Any]) -> list[Any]:
        """Runs a whole program, and returns its outputs."""
        outputs = self.run(closed, [program], self.given((x,) for x in arrays), _BACKWARD)
        return [value.arrays[0] for value in outputs]

    def inside(self, ctx: EqnContext[Around], operands: list[Values]) -> list[Values]:
        """Runs the body of a call, within the scopes around the call."""
        return super().inside(ctx._replace(state=ctx.state.at(ctx.eqn)), operands)

    def enters(self, eqn: JaxprEqn) -> bool:
        """True for a call, but not for a checkpoint.

        The equations of a checkpoint run again in the backward pass: a zero added inside would be
        one of its residuals, and change the program.
        """
        return eqn.primitive.name in CALLS and not runs_again(eqn)

    def emit(self, ctx: EqnContext[Around], operands: list[Values]) -> list[Values]:
        """Runs one equation, and taps its results."""
        i, eqn, (program,), around = ctx
        sources = refs_of(operands)
        results = program.emit(i, eqn, [value.arrays[0] for value in operands])
        here, made = around.at(eqn), []
        for k, (x, v) in enumerate(zip(results, eqn.outvars, strict=True)):
            refs = sources
            # A moved input or constant has no tap: with a zero added it would be a computed value,
            # and the gradients of its 16-bit copies would accumulate in 16 bits.
            if is_differentiable(v.aval) and not program.is_source(i, k):
                at = len(self.taps)
                refs = frozenset((at,))
                self.taps.append(Tap(described(eqn, [v], here), sources))
                self.avals.append(jax.typeof(x.array))
                x = self._tapped(at, x)
            made.append(Values((x,), refs))
        return made

    def _tapped(self, at: int, x: Value) -> Value:
        if self._zeros is None:
            return Value(_noticed(x.array, lambda: self.differentiated.add(at)))
        # The zero has the dtype of the value, and so its gradient is the exact cotangent.
        return Value(x.array + on_this_mesh(self._zeros[at])) if at in self._zeros else x


def _noticed(x: Any, differentiated: Callable[[], None]) -> Any:
    """Returns an array as it is, and calls back if JAX differentiates it."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @functools.partial(same.defjvp, symbolic_zeros=True)
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        (tangent,) = tangents
        if not isinstance(tangent, SymbolicZero):
            differentiated()
        return primals[0], tangent

    return same(x)


def tapped(
    closed: ClosedJaxpr, program: Program, arrays: Sequence[Any], wrt: Sequence[int]
) -> tuple[list[Tap], list[Any], list[Any]]:
    """Returns the values of a program with a cotangent, their cotangents, and gradients.

    Args:
        closed: The jaxpr of a function whose first output is a scalar float.
        program: The way to run its equations.
        arrays: The arguments.
        wrt: The positions of the differentiated arguments.
    """
    chosen = [arrays[i] for i in wrt]

    def scalar(tapper: Tapper, chosen: Sequence[Any]) -> Any:
        outputs = of_positions(lambda *xs: tapper.outputs(closed, program, xs), arrays, wrt)
        return outputs(*chosen)[0]

    # An abstract run without zeros finds the results that JAX differentiates, and their shapes.
    finder = Tapper()
    jax.eval_shape(jax.grad(functools.partial(scalar, finder)), chosen)
    found = sorted(finder.differentiated)
    zeros = {at: jnp.zeros(finder.avals[at].shape, finder.avals[at].dtype) for at in found}

    gradient: Callable[..., Any] = jax.grad(
        lambda zeros, chosen: scalar(Tapper(zeros), chosen), argnums=(0, 1)
    )
    of_taps, gradients = gradient(zeros, chosen)
    position = {at: k for k, at in enumerate(found)}
    taps = [
        tap._replace(sources=frozenset(position[at] for at in tap.sources if at in position))
        for tap in (finder.taps[at] for at in found)
    ]
    return taps, [of_taps[at] for at in found], gradients
