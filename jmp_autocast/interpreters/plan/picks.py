"""What stands between a value in 16 bits and the few elements of it that are picked in float32.

A cross entropy reads one log-probability a row. The picked element of ``logits - max - log(sum)``
is that of ``logits``, less the maximum and the logarithm of its row: so it is picked first and
computed then. A TPU stores the operand of a gather: 1.65 GB of float32 log-probabilities for
8 x 1024 tokens of a vocabulary of 50,257, half of what the step of a GPT of two layers takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..compat import Literal, body_of
from ..primitives.picking import picks
from ..primitives.structure import STRUCTURES, bodies, is_plain_call
from ..primitives.traits import BACKWARD
from .data import Bind, Cast, EquationPlan, Keep, Move, Pick
from .region import Place

_ELEMENTWISE = frozenset(name for name, words in BACKWARD.items() if "elementwise" in words)
_BROADCASTS = "broadcast_in_dim"


@dataclasses.dataclass(slots=True, eq=False)
class _Jaxpr:
    """A jaxpr, and the plain call that it is the body of, if it is one.

    Args:
        jaxpr: The open jaxpr.
        caller: The jaxpr that the call stands in, None for no plain call.
        call: The call.
    """

    jaxpr: Any
    caller: _Jaxpr | None = None
    call: Any = None
    made: dict[Any, Any] | None = None

    def maker(self, v: Any) -> Any:
        """Returns the equation that makes a value, None for an input or constant."""
        if self.made is None:
            self.made = {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}
        return self.made.get(v)


def beside_picks(jaxpr: Any) -> frozenset[int]:
    """Returns the ids of the equations that a value goes through before elements are picked of it.

    Those are elementwise equations, and the plain calls that they and the gathers stand in.

    Args:
        jaxpr: The jaxpr of the whole program; it has to live as long as the ids are used.
    """
    found: set[int] = set()
    body = body_of(jaxpr)
    if holds := _holding(body):
        _visit(_Jaxpr(body), holds, found)
    return frozenset(found)


def _holding(jaxpr: Any) -> set[int]:
    """Returns the ids of a jaxpr and of those in it, as far as one of them has a pick inside."""
    answers: dict[int, bool] = {}

    def look(jaxpr: Any) -> bool:
        if id(jaxpr) not in answers:
            inner = [look(body_of(b.jaxpr)) for eqn in jaxpr.eqns for b in bodies(eqn)]
            answers[id(jaxpr)] = any(inner) or any(map(picks, jaxpr.eqns))
        return answers[id(jaxpr)]

    look(jaxpr)
    return {key for key, holds in answers.items() if holds}


def _visit(at: _Jaxpr, holds: set[int], found: set[int]) -> None:
    for eqn in at.jaxpr.eqns:
        if picks(eqn):
            _follow(at, eqn.invars[0], found)
        for body in bodies(eqn):
            inner = body_of(body.jaxpr)
            if id(inner) not in holds:
                continue
            inside = _Jaxpr(inner, at, eqn) if is_plain_call(eqn) else _Jaxpr(inner)
            _visit(inside, holds, found)


def _follow(at: _Jaxpr, v: Any, found: set[int]) -> None:
    """Adds the elementwise equations that make a value, from the last to the first."""
    entered = []
    while True:
        if isinstance(v, Literal):
            return
        eqn = at.maker(v)
        if eqn is None:
            if at.caller is None or v not in at.jaxpr.invars:
                return
            # What is picked outside of the call has to be there, and its gradient with it.
            found.add(id(at.call))
            at, v = at.caller, at.call.invars[at.jaxpr.invars.index(v)]
        elif is_plain_call(eqn):
            entered.append(id(eqn))
            inner = body_of(bodies(eqn)[0].jaxpr)
            at, v = _Jaxpr(inner, at, eqn), inner.outvars[eqn.outvars.index(v)]
        else:
            break
    name = eqn.primitive.name
    if id(eqn) in found or (name not in _ELEMENTWISE and name != _BROADCASTS):
        return
    found.update(entered, [id(eqn)])
    if name != _BROADCASTS:
        for operand in eqn.invars:
            if operand.aval.shape == eqn.outvars[0].aval.shape:
                _follow(at, operand, found)


def beside_pick(at: Place, plan: EquationPlan) -> EquationPlan:
    """Returns the plan of an equation that picks elements, or that stands before one that does.

    Args:
        at: The equation.
        plan: Its plan so far.
    """
    is_wide = bool(plan.results) and plan.results[0].dtype == at.wide and not plan.casts
    replicates = isinstance(plan.action, Bind) and plan.action.replicates
    if not is_wide or replicates or at.name in STRUCTURES:
        return plan
    if not picks(at.eqn):
        made_of_operands = isinstance(plan.action, Keep | Bind | Cast | Move)
        return dataclasses.replace(plan, keeps_operands=made_of_operands)
    lowers = at.region.compute_dtype is not None and at.region.island is None
    if not lowers or not isinstance(plan.action, Keep | Bind):
        return plan
    return dataclasses.replace(plan, action=Pick())
