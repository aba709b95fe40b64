"""Which array no element of another one exceeds: what a softmax takes off before its `exp`.

`held` says whose elements a value holds, moved or masked; `exceeded` says whose elements it is not
below, as the largest of them, a maximum with others, or the logarithm of the sum of their `exp`. A
mean, a bias or a smallest element is below some: `exp(p - p.mean())` was infinite in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, Var, body_of
from ..primitives.structure import called, is_call
from ..primitives.traits import having

_PICKS = having("picks")
_MOVES = (having("moves") | {"convert_element_type"}) - _PICKS - having("travels")
_LOGS = frozenset(("log", "log1p"))
_SUMS_UP = _MOVES | {"reduce_sum", "add", "max", "abs"}
# Of a value of more arrays nothing is known: a chain of a thousand masks would take their square.
_MOST = 64

Found: TypeAlias = frozenset[Var]
_NONE: Found = frozenset()


def normalizers_of(jaxpr: Jaxpr, memo: dict[Any, Any]) -> Normalizers:
    """Returns what is known of a jaxpr, found out once.

    Args:
        jaxpr: An open jaxpr.
        memo: What is known already; who owns it keeps the jaxprs alive.
    """
    key = "normalizers", id(jaxpr)
    if key not in memo:
        memo[key] = Normalizers(jaxpr, memo)
    return memo[key]


class Normalizers:
    """What is known of one jaxpr; its equations are looked at when it is first asked.

    Args:
        jaxpr: An open jaxpr.
        memo: As for `normalizers_of`.
    """

    def __init__(self, jaxpr: Jaxpr, memo: dict[Any, Any]) -> None:
        self.jaxpr = jaxpr
        self._memo = memo
        self._makers: dict[Var, JaxprEqn] = {}
        # Where there is no entry, a value holds its own elements, and is not below no others.
        self._moved: dict[Var, Found] = {}
        self._held: dict[Var, Found] = {}
        self._exceeded: dict[Var, Found] = {}
        self._is_swept = False

    def ends_at_0(self, eqn: JaxprEqn) -> bool:
        """Returns whether a difference is at most 0: of a value and what no element exceeds.

        Args:
            eqn: A `sub`.
        """
        value, taken_off = eqn.invars
        return not self.exceeded(taken_off).isdisjoint(self.held(value))

    def is_of_one_cumsum(self, eqn: JaxprEqn) -> bool:
        """Returns whether a difference is one of elements of one cumulative sum.

        Args:
            eqn: A `sub`.
        """
        shared = frozenset.intersection(*map(self.held, eqn.invars))
        return "cumsum" in map(self.made_by, shared)

    def chooses_nan(self, eqn: JaxprEqn) -> bool:
        """Returns whether the second case of a choice is for what is NaN.

        Args:
            eqn: A `select_n`.
        """
        maker = self.maker(eqn.invars[0])
        if maker is None or maker.primitive.name != "ne":
            return False
        return maker.invars[0] is maker.invars[1]

    # `JaxprEqn | None` would say it, but is partly unknown to `pyright --verifytypes`.
    def maker(self, atom: Atom) -> Any:
        """Returns the equation that makes a value; None for an input or a literal."""
        return None if isinstance(atom, Literal) else self._swept()._makers.get(atom)

    def made_by(self, atom: Atom) -> str:
        """Returns the name of the primitive that makes a value, in whatever call."""
        eqn = self.maker(atom)
        if eqn is None:
            return ""
        if not is_call(eqn):
            return eqn.primitive.name
        inner = self._inside(eqn)
        return inner.made_by(inner.jaxpr.outvars[list(eqn.outvars).index(atom)])

    def held(self, atom: Atom) -> Found:
        """Returns the arrays of which a value holds elements, itself among them."""
        return _NONE if isinstance(atom, Literal) else self._swept()._held.get(atom, _one(atom))

    def moved(self, atom: Atom) -> Found:
        """Returns the arrays of which a value holds all elements but those of a mask."""
        return _NONE if isinstance(atom, Literal) else self._swept()._moved.get(atom, _one(atom))

    def exceeded(self, atom: Atom) -> Found:
        """Returns the arrays of whose elements, where they meet, a value is not below any."""
        return _NONE if isinstance(atom, Literal) else self._swept()._exceeded.get(atom, _NONE)

    def _swept(self) -> Normalizers:
        if not self._is_swept:
            self._is_swept = True  # what an equation reads stands before it
            for eqn in self.jaxpr.eqns:
                self._look_at(eqn)
        return self

    def _look_at(self, eqn: JaxprEqn) -> None:
        self._makers.update(dict.fromkeys(eqn.outvars, eqn))
        name, read = eqn.primitive.name, eqn.invars
        if is_call(eqn):
            self._look_into(eqn)
            return
        cases = read[1:] if name == "select_n" else read[:1]
        for v in eqn.outvars:
            if name in _MOVES or name == "select_n":
                self._moved[v] = _joined(_one(v), map(self.moved, cases))
            if name in _MOVES or name in _PICKS or name == "select_n":
                self._held[v] = _joined(_one(v), map(self.held, cases))
            if (rule := _EXCEEDS.get(name)) and (found := rule(self, eqn)):
                self._exceeded[v] = found

    def _look_into(self, eqn: JaxprEqn) -> None:
        inner = self._inside(eqn)
        body = inner.jaxpr

        def given(found: Found) -> list[Atom]:
            return [v for v, x in zip(eqn.invars, body.invars, strict=True) if x in found]

        for v, result in zip(eqn.outvars, body.outvars, strict=True):
            moved, largest = inner.moved(result), inner.exceeded(result)
            self._moved[v] = _joined(_one(v), map(self.moved, given(moved)))
            self._held[v] = _joined(_one(v), map(self.held, given(inner.held(result))))
            found = [*map(self.moved, given(largest)), *map(self.exceeded, given(largest | moved))]
            self._exceeded[v] = _joined(_NONE, found)

    def _inside(self, eqn: JaxprEqn) -> Normalizers:
        return normalizers_of(body_of(called(eqn)), self._memo)


def _one(v: Var) -> Found:
    return frozenset((v,))


def _joined(own: Found, others: Iterable[Found]) -> Found:
    found = own.union(*others)
    return found if len(found) <= _MOST else own


_Rule: TypeAlias = Callable[[Normalizers, JaxprEqn], Found]


def _passed(it: Normalizers, eqn: JaxprEqn) -> Found:
    return it.exceeded(eqn.invars[0])


def _of_largest(it: Normalizers, eqn: JaxprEqn) -> Found:
    return _joined(_NONE, [*map(it.moved, eqn.invars), *map(it.exceeded, eqn.invars)])


def _of_cases(it: Normalizers, eqn: JaxprEqn) -> Found:
    return _joined(_NONE, map(it.exceeded, eqn.invars[1:]))


def _of_sum(it: Normalizers, eqn: JaxprEqn) -> Found:
    # `m + log(sum(exp(x - m)))`, or a number of the program beside the largest.
    a, b = eqn.invars
    found = [
        it.exceeded(v)
        for v, other in ((a, b), (b, a))
        if isinstance(other, Literal) or it.made_by(other) in _LOGS
    ]
    return _joined(_NONE, found)


def _of_log(it: Normalizers, eqn: JaxprEqn) -> Found:
    maker, has_sum = it.maker(eqn.invars[0]), False
    while maker is not None and maker.primitive.name in _SUMS_UP:
        has_sum |= maker.primitive.name == "reduce_sum"
        maker = it.maker(maker.invars[0])
    if maker is None or not has_sum or maker.primitive.name != "exp":
        return _NONE
    return it.moved(maker.invars[0])


_EXCEEDS: Mapping[str, _Rule] = {
    **dict.fromkeys(_MOVES, _passed),
    **dict.fromkeys(("reduce_max", "cummax", "max", "pmax", "reduce_window_max"), _of_largest),
    "select_n": _of_cases,
    "add": _of_sum,
    "log": _of_log,
}
"""How a primitive makes what is not below other arrays; of a call the body says it."""
