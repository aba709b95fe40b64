"""Edits jaxprs without a trace. Unchanged equations and variables stay the same objects."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex_core
from jax.extend.core import JaxprEqn, Var

from . import AnyJaxpr, Atom, Literal, body_of, mark_frames

mark_frames(__file__)


def variable(aval: Any) -> Var:
    """Returns a new variable with an abstract value."""
    return jex_core.Var(aval)


def is_dropped(variable: Var) -> bool:
    """Returns whether a result variable is the placeholder of an unused result."""
    return isinstance(variable, jex_core.DropVar)


def renamed(atoms: Sequence[Atom], names: Mapping[Any, Any]) -> list[Any]:
    """Returns atoms in which each variable in ``names`` is replaced by its entry."""
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]


def with_equations(
    jaxpr: AnyJaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any] | None = None
) -> Any:
    """Returns a jaxpr with other equations and outputs, or the given jaxpr if nothing differs.

    Args:
        jaxpr: An open or closed jaxpr.
        eqns: The equations, functions of its inputs and constants.
        outvars: The outputs; None for the outputs of ``jaxpr``.
    """
    body = body_of(jaxpr)
    returned: Sequence[Any] = body.outvars if outvars is None else outvars
    if _are_same(eqns, body.eqns) and _are_same(returned, body.outvars):
        return jaxpr
    changed = body.replace(eqns=list(eqns), outvars=list(returned))
    return changed if body is jaxpr else jaxpr.replace(jaxpr=changed)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def standing_in(
    call: JaxprEqn, eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Returns an equation of a called jaxpr, changed so that it can be inlined at the call.

    Args:
        call: The equation of the call.
        eqn: An equation of the called jaxpr.
        operands: The operands of ``eqn`` at the call.
        results: The variables of its results.
    """
    info = eqn.source_info
    info = info.replace(name_stack=call.source_info.name_stack + info.name_stack)
    return eqn.replace(invars=list(operands), outvars=list(results), source_info=info)
