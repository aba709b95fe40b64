"""Replaces the tracers in a user's derivative rule by values of the rewritten program.

A rule of a custom function is a Python function, which JAX calls when it differentiates or batches.
Without `autocast` and `jit`, the rule may close over any value of the enclosing function, as
implicit differentiation does. `autocast` has traced that function, so the rule closes over tracers
of a trace that has ended. The variable of such a tracer identifies the value of the rewritten
program.

Only the rule's own closure is searched. For a tracer in the closure of a function that the rule
calls, JAX raises the same error as under `jit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Hashable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import jax

from ..compat import AnyJaxpr, JaxprEqn, body_of, consts_of, traced_variable
from ..compat.same_rules import cells_of
from ..primitives.structure import STRUCTURES, bodies, holds_rules, rule_of
from .values import Value


class ClosedOver:
    """The values of one trace that the user's rules close over."""

    def __init__(self) -> None:
        self._variables: set[Any] = set()
        self._values: dict[Any, Value] = {}
        # This object keeps the equations alive, so that no other equation can get the same id.
        self._equations: dict[int, Any] = {}
        self._rules: dict[int, tuple[Any, Hashable]] = {}

    @property
    def holds_any(self) -> bool:
        """Whether a rule closes over any value of the program."""
        return bool(self._variables)

    def look(self, jaxpr: AnyJaxpr) -> bool:
        """Finds the rules in a jaxpr that close over its values; returns whether there are any.

        Args:
            jaxpr: A closed jaxpr, which is evaluated once.
        """
        held: list[tuple[Any, set[Any]]] = []
        if not (found := self._found(jaxpr, held, {})):
            return False
        body = body_of(jaxpr)
        made = (v for eqn in body.eqns for v in eqn.outvars)
        self._variables |= found.intersection((*body.constvars, *body.invars, *made))
        # Skips rules that hold only tracers of other programs, whose traces have not ended.
        here = [eqn for eqn, variables in held if not variables.isdisjoint(self._variables)]
        self._equations.update((id(eqn), eqn) for eqn in here)
        return bool(here)

    def _found(
        self,
        jaxpr: AnyJaxpr,
        held: list[tuple[Any, set[Any]]],
        seen: dict[int, tuple[AnyJaxpr, set[Any]]],
    ) -> set[Any]:
        """Returns the variables that rules in a jaxpr close over.

        Each equation with such rules is appended to ``held``, with the variables of its rules.

        A jaxpr that several equations call is searched once. Otherwise, the time would grow
        exponentially if each jitted function calls another one twice.
        """
        if id(jaxpr) in seen:
            return seen[id(jaxpr)][1]
        found: set[Any] = set()
        for eqn in (e for e in body_of(jaxpr).eqns if e.primitive.name in STRUCTURES):
            variables = set().union(*[self._found(b.jaxpr, held, seen) for b in bodies(eqn)])
            if holds_rules(eqn):
                key, own = rule_of(eqn)
                self._rules[id(eqn)] = eqn, key
                leaves = (leaf for rule in own for leaf in _leaves_of(rule))
                variables |= {v for leaf in leaves if (v := traced_variable(leaf)) is not None}
            if variables:
                held.append((eqn, variables))
                found |= variables
        seen[id(jaxpr)] = jaxpr, found
        return found

    def rule_of(self, eqn: JaxprEqn) -> Hashable:
        """Returns a key that is equal for calls of one custom function, whatever jaxprs they hold.

        Args:
            eqn: The equation, which need not be in a jaxpr that was searched.
        """
        return self._rules[id(eqn)][1] if id(eqn) in self._rules else rule_of(eqn)[0]

    def by(self, eqn: JaxprEqn) -> bool:
        """Returns whether a rule in an equation, at any depth, closes over values."""
        return id(eqn) in self._equations

    def keep(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        """Keeps the values that a rule closes over.

        Args:
            variables: Variables of the jaxpr that is evaluated.
            values: Their values.
        """
        if self._variables:
            pairs = zip(variables, values, strict=True)
            self._values.update({v: value for v, value in pairs if v in self._variables})

    def live(self, closed: AnyJaxpr) -> Any:
        """Returns a rule's jaxpr with the kept values in place of tracers of an ended trace.

        Args:
            closed: The closed jaxpr.
        """
        if not self._values:
            return closed
        return closed.replace(consts=[self._value(const) for const in consts_of(closed)])

    def _value(self, const: Any) -> Any:
        kept = self._values.get(traced_variable(const))
        # The `Value` is new, because copies that are made in the trace of a rule must not outlive
        # that trace.
        return const if kept is None else Value(kept.array, kept.source).read(const.dtype)

    def arrays(self) -> list[Any]:
        """Returns the arrays of the kept values."""
        return [value.array for value in self._values.values()]


@dataclasses.dataclass(eq=False)
class KeepsValues:
    """Holds the values that rebuilt rules close over.

    An outer `autocast` reads them from the rules that an inner `autocast` has rebuilt.
    """

    closed_over: ClosedOver = dataclasses.field(default_factory=ClosedOver, init=False)


def _leaves_of(rule: Any) -> Iterator[Any]:
    """Yields the leaves of the objects that a rule holds: its cells, defaults and bound arguments.

    The instance of a bound method is searched only if it is a pytree; its attributes are not.
    """
    rule = inspect.unwrap(rule)
    if isinstance(rule, functools.partial):
        yield from _leaves_of(rule.func)
        held = [*rule.args, *rule.keywords.values()]
    elif isinstance(rule, MethodType):
        yield from _leaves_of(rule.__func__)
        held = [rule.__self__]
    elif isinstance(rule, FunctionType):
        held = [*cells_of(rule).values(), rule.__defaults__, rule.__kwdefaults__]
    else:
        held = [rule]
    for x in held:
        if isinstance(x, KeepsValues):
            yield from x.closed_over.arrays()
        else:
            with contextlib.suppress(Exception):  # not a pytree: a dict whose keys have no order
                yield from jax.tree.leaves(x)
