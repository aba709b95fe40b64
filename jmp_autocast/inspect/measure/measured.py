"""The equations of a program that are measured: those that can make new values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ...interpreters.compat import (
    AnyJaxpr,
    JaxprEqn,
    body_of,
    is_array_aval,
    is_unreduced,
    name_stack,
    scope_names,
    source_line,
)
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import Body, bodies, is_call
from ...interpreters.primitives.traits import having
from ...scopes import read_mark

# Their results hold no value that their operands do not, so nothing can go wrong in them. XLA need
# not compile what is left out here, and compiling takes most of the time of `check_numerics`.
_SAME_VALUES = having("same")


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredEquation:
    """One equation of a program, as plain data.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        inside: The loops, branches and device maps around it, outermost first.
        backward: It belongs to a backward pass that JAX made.
        shapes: The shape of each float result.
        dtypes: The dtype of each float result.
    """

    scope: str
    source: str
    primitive: str
    inside: tuple[str, ...]
    backward: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


Row = TypeVar("Row", bound=MeasuredEquation)


def each_reading(
    equations: Iterable[MeasuredEquation], readings: Any
) -> Iterator[tuple[MeasuredEquation, Any]]:
    """Yields each equation with its reading as Python numbers.

    Args:
        equations: The equations.
        readings: What was measured of them, as arrays with an element per equation.
    """
    for i, equation in enumerate(equations):
        yield equation, jax.tree.map(lambda x, i=i: x[i].item(), readings)


@dataclasses.dataclass(frozen=True)
class Around:
    """What is around an equation, on a walk into a program.

    Args:
        names: The scopes.
        inside: The loops, branches and device maps, outermost first.
        loops: The lengths of the loops.
        backward: It stands in a backward pass.
        source: The source line.
    """

    names: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    loops: tuple[int, ...] = ()
    backward: bool = False
    source: str = ""

    def at(self, eqn: JaxprEqn) -> Around:
        """Returns this with an equation's own scopes and line."""
        return dataclasses.replace(
            self,
            names=(*self.names, *user_scopes(eqn)),
            # JAX marks the name stack of what it transposes. What is inside has no mark of its own.
            backward=self.backward or "transpose(" in name_stack(eqn),
            # A jaxpr that JAX's own functions have made, as that of `jnp.var`, has no line of the
            # user's. The line of its call stands for it.
            source=source_line(eqn) or self.source,
        )

    def within(self, eqn: JaxprEqn, body: Body) -> Around:
        """Returns what is around the equations of a body, of an equation that this is at."""
        name = eqn.primitive.name
        loops = (*self.loops, body.repeats) if name == "scan" else self.loops
        inside = self.inside if is_call(eqn) else (*self.inside, name)
        return dataclasses.replace(self, inside=inside, loops=loops)


OUTSIDE = Around()
"""Around a whole program."""


def measured_equations(jaxpr: AnyJaxpr, around: Around = OUTSIDE) -> Iterator[MeasuredEquation]:
    """Yields the measured equations of a jaxpr in program order, those inside one in its place.

    Args:
        jaxpr: An open or closed jaxpr.
        around: What is around it.
    """
    for eqn in body_of(jaxpr).eqns:
        here = around.at(eqn)
        for body in bodies(eqn):
            yield from measured_equations(body.jaxpr, here.within(eqn, body))
        if is_measured(eqn):
            yield described(eqn, eqn.outvars, here)


def described(eqn: JaxprEqn, results: Sequence[Any], around: Around) -> MeasuredEquation:
    """Returns an equation as plain data.

    Args:
        eqn: The equation.
        results: Its results, or some of them.
        around: What is around it.
    """
    avals = [v.aval for v in results if is_measurable(v.aval)]
    return MeasuredEquation(
        scope="/".join(around.names),
        source=around.source,
        # An accumulating contraction is our own primitive: users know the one that it stands for.
        primitive=(contraction_in(eqn) or eqn).primitive.name,
        inside=around.inside,
        backward=around.backward,
        shapes=tuple(tuple(aval.shape) for aval in avals),
        dtypes=tuple(aval.dtype.name for aval in avals),
    )


def scopes_of(rows: Iterable[Row], depth: int | None) -> dict[str, list[Row]]:
    """Returns the rows of each scope.

    Args:
        rows: The rows.
        depth: How many names of a scope count, None for all.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault("/".join(row.scope.split("/")[:depth]), []).append(row)
    return found


def user_scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the scopes of the user's own around an equation, without the marks of ours."""
    return user_names(scope_names(eqn))


def user_names(scope: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a scope that are the user's own."""
    return tuple(name for name in scope if read_mark(name) is None)


def is_measured(eqn: JaxprEqn) -> bool:
    """True for an equation that is measured itself."""
    if bodies(eqn) or eqn.primitive.name in _SAME_VALUES:
        return False
    return any(is_measurable(v.aval) for v in eqn.outvars)


def largest_element(x: Any) -> Any:
    """Returns the largest element of an array, NaN if one is NaN.

    The maximum of XLA:CPU drops a NaN among about 4,096 float32 numbers or more (JAX 0.10.2 to
    0.12.0.1).
    """
    return jnp.where(jnp.isnan(x).any(), jnp.nan, jnp.max(x)).astype(x.dtype)


def is_measurable(aval: Any) -> bool:
    """True for arrays of floats or complex numbers that hold an element and are added up."""
    # An array without elements has no largest one, and nothing can go wrong in it. Integers do not
    # round, and are never infinite.
    if not is_array_aval(aval) or not jnp.issubdtype(aval.dtype, jnp.inexact) or 0 in aval.shape:
        return False
    # Parts on devices that are not yet added up stay so: XLA of JAX 0.10.2 adds up a gradient that
    # a loop carries as such parts more than once where it is read in between (error 0.96).
    return not is_unreduced(aval)


def is_differentiable(aval: Any) -> bool:
    """True for arrays of real floats that are measured: each may have a cotangent."""
    return is_measurable(aval) and jnp.issubdtype(aval.dtype, jnp.floating)


def as_real(x: Any) -> Any:
    """Returns complex numbers as twice as many real ones."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return jnp.stack([jnp.real(x), jnp.imag(x)]) if is_complex else x
