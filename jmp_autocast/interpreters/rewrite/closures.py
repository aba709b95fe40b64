"""What rules of the user's own close over: converted to values of the running program.

A rule of a custom function is Python, which JAX calls when it differentiates or maps. Where the
plain function runs outside of `jit`, it may close over any value of the function around it, as
implicit differentiation does. `autocast` has traced that function, so that the rule holds a tracer
of a trace that is over. Its variable says which value of the rewritten program it stands for.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np

from ..compat import TRACES_AND_JAXPRS, Tracer, body_of, consts_of, traced_variable
from ..plan.data import EquationPlan, Plan
from ..primitives.structure import bodies, has_rule, rule_of, rules_of
from .values import Value

# No tracer that a rule closes over is behind them, and much else is.
_LEAVES = (
    type,
    ModuleType,
    CodeType,
    str,
    bytes,
    int,
    float,
    complex,
    np.dtype,
    np.ndarray,
    np.generic,
    jax.Array,
    # Behind each tree structure: the functions of every class that is a pytree, 100 objects.
    type(jax.tree_util.default_registry),
    Plan,
    EquationPlan,
    *TRACES_AND_JAXPRS,
)


class ClosedOver:
    """The values of one trace that rules of the user's own close over."""

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self._variables: set[Any] = set()
        self._values: dict[Any, Value] = {}
        # Alive as long as this is, so that no other equation gets the identity of one of them.
        self._equations: dict[int, Any] = {}
        self._rules: dict[int, tuple[Any, Hashable]] = {}

    def look(self, jaxpr: Any) -> bool:
        """Looks for rules in a jaxpr that close over values, and returns whether there are any.

        Args:
            jaxpr: A closed jaxpr, which is evaluated once.
        """
        behind: list[tuple[Any, set[Any]]] = []
        found = self._found(jaxpr, {}, behind)
        if not found:
            return False
        # JAX's caches hold tracers of other programs, which a rule may lead to as well.
        self._known.update(_variables_of(jaxpr))
        here = [eqn for eqn, variables in behind if not variables.isdisjoint(self._known)]
        self._equations.update((id(eqn), eqn) for eqn in here)
        body = body_of(jaxpr)
        made = (v for eqn in body.eqns for v in eqn.outvars)
        self._variables.update(found.intersection((*body.constvars, *body.invars, *made)))
        return bool(here)

    def _found(
        self, jaxpr: Any, clean: dict[int, Any], behind: list[tuple[Any, set[Any]]]
    ) -> set[Any]:
        """Returns the variables of tracers behind rules in a jaxpr, and those of each equation."""
        found: set[Any] = set()
        for eqn in body_of(jaxpr).eqns:
            inside = [self._found(body.jaxpr, clean, behind) for body in bodies(eqn)]
            variables = _variables_behind(self._own(eqn), clean).union(*inside)
            if variables:
                behind.append((eqn, variables))
                found |= variables
        return found

    def _own(self, eqn: Any) -> Sequence[Any]:
        """Returns what an equation holds besides functions of JAX's, which are made at each call.

        They close over no value of a program. `jax.nn.relu` took 0.1 ms to look through each time.
        """
        if not has_rule(eqn):
            return rules_of(eqn)
        own: list[Any] = []
        self._rules[id(eqn)] = eqn, rule_of(eqn, own)
        return own

    def rule_of(self, eqn: Any) -> Hashable:
        """Returns what equations that call one custom function have in common beside their jaxprs.

        Args:
            eqn: The equation, of a jaxpr that was looked at.
        """
        return self._rules[id(eqn)][1] if id(eqn) in self._rules else rule_of(eqn)

    def by(self, eqn: Any) -> bool:
        """Returns whether a rule of an equation, or of one inside it, closes over values."""
        return id(eqn) in self._equations

    def keep(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        """Keeps those values that a rule closes over.

        Args:
            variables: Variables of the jaxpr that is evaluated.
            values: Their values.
        """
        if self._variables:
            pairs = zip(variables, values, strict=True)
            self._values.update({v: value for v, value in pairs if v in self._variables})

    def live(self, closed: Any) -> Any:
        """Returns the jaxpr of a rule, with values in place of tracers of a trace that is over.

        Args:
            closed: The closed jaxpr.
        """
        if not self._values:
            return closed
        return closed.replace(consts=[self._value(const) for const in consts_of(closed)])

    def _value(self, const: Any) -> Any:
        kept = self._values.get(traced_variable(const))
        # A value of its own: a copy that is made in the trace of a rule must not outlive it.
        return const if kept is None else Value(kept.array, kept.source).read(const.dtype)

    def arrays(self) -> list[Any]:
        """Returns the arrays that are kept."""
        return [value.array for value in self._values.values()]


def _variables_of(jaxpr: Any) -> Iterator[Any]:
    """Yields the variables of a jaxpr and of those inside it."""
    body = body_of(jaxpr)
    yield from (*body.constvars, *body.invars)
    for eqn in body.eqns:
        yield from eqn.outvars
        for held in bodies(eqn):
            yield from _variables_of(held.jaxpr)


class KeepsValues:
    """What the rules that we rebuild close over.

    An `autocast` around the one that has rebuilt a rule finds in it the arrays that this one keeps.
    """

    def __init__(self) -> None:
        self.closed_over: ClosedOver = ClosedOver()


def _variables_behind(roots: Sequence[Any], clean: dict[int, Any]) -> set[Any]:
    """Returns the variable of each tracer of a jaxpr that objects hold, however deep.

    Args:
        roots: The objects.
        clean: Objects with no tracer behind them, by identity; those that are found are added, as
            many rules hold the same ones.
    """
    found: set[Any] = set()
    # Alive as long as the walk, as a list that was made for it has an identity of its own.
    left, seen = list(roots), {}
    while left:
        x = left.pop()
        key = id(x)
        if key in seen or key in clean or (isinstance(x, _LEAVES) and not isinstance(x, Tracer)):
            continue
        seen[key] = x
        if (variable := traced_variable(x)) is not None:
            found.add(variable)
        else:
            left.extend(_behind(x))
    if not found:
        clean.update(seen)
    return found


def _behind(x: Any) -> Iterable[Any]:
    if isinstance(x, KeepsValues):
        return x.closed_over.arrays()
    if isinstance(x, FunctionType):
        # Not its globals: no trace has anything in them, but all of a program is behind them.
        cells: tuple[CellType, ...] = x.__closure__ or ()
        return [*gc.get_referents(*cells), x.__defaults__, x.__kwdefaults__, x.__dict__]
    return gc.get_referents(x)
