"""Where a running program is measured: one site per equation that can make new values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from ...interpreters.compat import (
    body_of,
    inner_jaxpr_key,
    is_array_aval,
    name_stack,
    scope_names,
    source_line,
)
from ...policies import CALLS
from ...scopes import read_mark
from ..report.jaxprs import contraction_in

# Run by evaluating the one jaxpr that they hold. A custom rule matters to derivatives alone.
INLINED = CALLS | {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call"}
ENTERED = INLINED | {"scan", "while", "cond", "shard_map"}

# Their results hold no value that their operands do not.
_MOVES = frozenset(
    """
    broadcast_in_dim copy copy_p cpu_barrier expand_dims optimization_barrier pcast pvary reshape
    rev reverse slice split squeeze transpose
    """.split()
)


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
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


def sites_in(
    jaxpr: Any,
    names: Sequence[str] = (),
    inside: Sequence[str] = (),
    backward: bool = False,
    source: str = "",
) -> Iterator[Site]:
    """Yields the sites of a jaxpr in program order, those inside an equation in its place.

    Args:
        jaxpr: An open or closed jaxpr.
        names: The scopes around it.
        inside: The loops, branches and device maps around it.
        backward: It stands in a backward pass.
        source: The source line around it, for what JAX's own functions hold.
    """
    for eqn in body_of(jaxpr).eqns:
        path = (*names, *(name for name in scope_names(eqn) if read_mark(name) is None))
        transposed = backward or "transpose(" in name_stack(eqn)
        around = inside if eqn.primitive.name in INLINED else (*inside, eqn.primitive.name)
        line = source_line(eqn) or source
        for inner in bodies_of(eqn):
            yield from sites_in(inner, path, around, transposed, line)
        if is_site(eqn):
            results = [v.aval for v in eqn.outvars if is_measured(v.aval)]
            yield Site(
                scope="/".join(path),
                source=line,
                primitive=(contraction_in(eqn) or eqn).primitive.name,
                inside=tuple(inside),
                backward=transposed,
                shapes=tuple(tuple(aval.shape) for aval in results),
                dtypes=tuple(aval.dtype.name for aval in results),
            )


def is_site(eqn: Any) -> bool:
    """True for an equation that is measured itself, not by what is inside it."""
    name = eqn.primitive.name
    if name in ENTERED or name in _MOVES:
        return False
    return any(is_measured(v.aval) for v in eqn.outvars)


def is_measured(aval: Any) -> bool:
    """True for arrays of floats or complex numbers that hold an element."""
    return is_array_aval(aval) and jnp.issubdtype(aval.dtype, jnp.inexact) and 0 not in aval.shape


def bodies_of(eqn: Any) -> tuple[Any, ...]:
    """Returns the jaxprs that are run in place of an equation, in the order of its plan."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ENTERED:
        return ()
    if name == "while":
        return params["cond_jaxpr"], params["body_jaxpr"]
    if name == "cond":
        return tuple(params["branches"])
    if name in ("scan", "shard_map"):
        return (params["jaxpr"],)
    if name == "custom_vmap_call":
        return (params["call"],)
    return (params[inner_jaxpr_key(params)],)
