"""The measured equations of a program: those that have no bodies and compute new float values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...interpreters import compat
from ...interpreters.compat import AnyJaxpr, JaxprEqn, name_stack
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import Body, bodies, is_call
from ...interpreters.primitives.traits import having
from ...scopes import read_mark

# Each result element of these primitives is an element of an operand, so they cannot create a
# fault. They are not measured, which saves compile time, the largest cost of `check_numerics`.
_SAME_VALUES = having("same")


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredEquation:
    """One equation of a program, as plain data.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        inside: The loops, branches and ``shard_map`` around it, outermost first.
        backward: Whether the equation belongs to a backward pass that JAX created.
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


def each_reading(
    equations: Iterable[MeasuredEquation], readings: Any
) -> Iterator[tuple[MeasuredEquation, Any]]:
    """Yields each equation with its element of each array in ``readings``, as Python numbers."""
    for i, equation in enumerate(equations):
        yield equation, jax.tree.map(lambda x, i=i: x[i].item(), readings)


@dataclasses.dataclass(frozen=True)
class Around:
    """The scopes, loops and source line around an equation.

    Args:
        names: The scopes.
        inside: The loops, branches and ``shard_map``, outermost first.
        loops: The lengths of the loops.
        backward: Whether the equation is part of a backward pass.
        source: The source line.
    """

    names: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    loops: tuple[int, ...] = ()
    backward: bool = False
    source: str = ""

    def at(self, eqn: JaxprEqn) -> Around:
        """Returns the surroundings with an equation's own scopes and source line added."""
        return dataclasses.replace(
            self,
            names=(*self.names, *user_scopes(eqn)),
            # JAX marks the name stack of a transposed call, but not those of the equations inside
            # the call, so these equations inherit the mark.
            backward=self.backward or "transpose(" in name_stack(eqn),
            # An equation inside a function of JAX, such as `jnp.var`, gets the source line of the
            # enclosing call.
            source=compat.source_line(eqn) or self.source,
        )

    def within(self, eqn: JaxprEqn, body: Body) -> Around:
        """Returns the surroundings of the equations in a body of an equation."""
        name = eqn.primitive.name
        loops = (*self.loops, body.repeats) if name == "scan" else self.loops
        inside = self.inside if is_call(eqn) else (*self.inside, name)
        return dataclasses.replace(self, inside=inside, loops=loops)


OUTSIDE = Around()
"""The surroundings of a whole program."""


def measured_equations(jaxpr: AnyJaxpr, around: Around = OUTSIDE) -> Iterator[MeasuredEquation]:
    """Yields the measured equations of a jaxpr and of its bodies, in program order."""
    for eqn in compat.body_of(jaxpr).eqns:
        here = around.at(eqn)
        for body in bodies(eqn):
            yield from measured_equations(body.jaxpr, here.within(eqn, body))
        if is_measured(eqn):
            yield described(eqn, here)


def described(eqn: JaxprEqn, around: Around) -> MeasuredEquation:
    """Returns an equation as plain data."""
    avals: list[Any] = [v.aval for v in eqn.outvars if is_measurable(v.aval)]
    return MeasuredEquation(
        scope="/".join(around.names),
        source=around.source,
        # Instead of `accumulate`, a primitive of this package, the row has the name of the
        # contraction inside it, which users know.
        primitive=(contraction_in(eqn) or eqn).primitive.name,
        inside=around.inside,
        backward=around.backward,
        shapes=tuple(tuple(aval.shape) for aval in avals),
        dtypes=tuple(aval.dtype.name for aval in avals),
    )


def user_scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the user's scopes around an equation, without the marks of this package."""
    return user_names(compat.scope_names(eqn))


def user_names(scope: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a scope that are no marks of this package."""
    return tuple(name for name in scope if read_mark(name) is None)


def is_measured(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has no bodies and computes new float values."""
    if bodies(eqn) or eqn.primitive.name in _SAME_VALUES:
        return False
    return any(is_measurable(v.aval) for v in eqn.outvars)


def largest_element(x: Any) -> Any:
    """Returns the largest element of an array, NaN if any element is NaN.

    The maximum of XLA:CPU drops a NaN among about 4,096 float32 numbers or more (JAX 0.10.2 to
    0.12.0.1).
    """
    return jnp.where(jnp.isnan(x).any(), jnp.nan, jnp.max(x)).astype(x.dtype)


def is_measurable(aval: Any) -> bool:
    """Returns whether an aval is a non-empty inexact array that is not `unreduced` over devices."""
    # Integers do not round, and are never infinite.
    is_array = compat.is_array_aval(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)
    if not is_array or 0 in aval.shape:
        return False
    # If an equation reads an unreduced carry of a loop, XLA of JAX 0.10.2 sums the carry over the
    # devices more than once (error 0.96).
    return not compat.is_unreduced(aval)


def is_differentiable(aval: Any) -> bool:
    """Returns whether an aval is a measurable array of real floats, which may have cotangents."""
    return is_measurable(aval) and jnp.issubdtype(aval.dtype, jnp.floating)


def as_real(x: Any) -> Any:
    """Returns complex numbers as their real and imaginary parts, real numbers as they are."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return jnp.stack([jnp.real(x), jnp.imag(x)]) if is_complex else x
