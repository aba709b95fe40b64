"""Which array no element of another one exceeds: what a softmax takes off before its `exp`.

It is read backward from a difference, and only there. `held` says whose elements a value holds,
moved or masked; `exceeded` says whose elements it is not below, as the largest of them, a maximum
with others, or the logarithm of the sum of their `exp`. A mean, a bias or a smallest element is
below some: `exp(p - p.mean())` was infinite in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, Var, body_of
from ..primitives.structure import called, is_call
from ..primitives.traits import having

_PICKS = frozenset(("slice", "dynamic_slice", "gather", "split", "unstack"))
_BETWEEN_DEVICES = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all ppermute ragged_all_to_all
    """.split()
)
_MOVES = (having("moves") | {"convert_element_type"}) - _PICKS - _BETWEEN_DEVICES
_LOGS = frozenset(("log", "log1p"))
_SUMS_UP = _MOVES | {"reduce_sum", "add", "max", "abs"}

Found: TypeAlias = frozenset[Var]
_NONE: Found = frozenset()


class Normalizers:
    """What is known of one jaxpr.

    Args:
        jaxpr: An open jaxpr.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._makers: Mapping[Var, JaxprEqn] | None = None

    def ends_at_0(self, eqn: JaxprEqn) -> bool:
        """Returns whether a difference is at most 0: of a value and what no element exceeds.

        Args:
            eqn: A `sub`.
        """
        value, taken_off = eqn.invars
        found = self.exceeded(taken_off)
        return bool(found) and not found.isdisjoint(self.held(value))

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

    def maker(self, atom: Atom) -> JaxprEqn | None:
        """Returns the equation that makes a value; None for an input or a literal."""
        if isinstance(atom, Literal):
            return None
        if self._makers is None:
            self._makers = {v: eqn for eqn in self._jaxpr.eqns for v in eqn.outvars}
        return self._makers.get(atom)

    def made_by(self, atom: Atom) -> str:
        """Returns the name of the primitive that makes a value, in whatever call."""
        eqn = self.maker(atom)
        if eqn is None:
            return ""
        if not is_call(eqn):
            return eqn.primitive.name
        inner, result = _inside(eqn, atom)
        return inner.made_by(result)

    def held(self, atom: Atom, through: frozenset[str] = _MOVES | _PICKS) -> Found:
        """Returns the arrays whose elements a value holds, itself among them.

        Args:
            atom: The value.
            through: What moves them: without picks, it holds all elements but those of a mask.
        """
        if isinstance(atom, Literal):
            return _NONE
        found, eqn = frozenset((atom,)), self.maker(atom)
        if eqn is None:
            return found
        if eqn.primitive.name in through:
            return found | self.held(eqn.invars[0], through)
        if eqn.primitive.name == "select_n":
            return found.union(*[self.held(v, through) for v in eqn.invars[1:]])
        if is_call(eqn):
            inner, result = _inside(eqn, atom)
            given = _given(eqn, inner.held(result, through))
            return found.union(*[self.held(v, through) for v in given])
        return found

    def exceeded(self, atom: Atom) -> Found:
        """Returns the arrays of whose elements, where they meet, a value is not below any."""
        eqn = self.maker(atom)
        if eqn is None:
            return _NONE
        if is_call(eqn):
            inner, result = _inside(eqn, atom)
            largest, moved = inner.exceeded(result), inner.held(result, _MOVES)
            return _NONE.union(
                *[self.held(v, _MOVES) for v in _given(eqn, largest)],
                *[self.exceeded(v) for v in _given(eqn, largest | moved)],
            )
        rule = _EXCEEDS.get(eqn.primitive.name)
        return _NONE if rule is None else rule(self, eqn)


def _inside(eqn: JaxprEqn, atom: Atom) -> tuple[Normalizers, Atom]:
    """Returns what is known of the body of a call, and a result of the call there."""
    body = body_of(called(eqn))
    return Normalizers(body), body.outvars[list(eqn.outvars).index(atom)]


def _given(eqn: JaxprEqn, found: Found) -> list[Atom]:
    """Returns the operands of a call that its body was found to hold."""
    pairs = zip(eqn.invars, body_of(called(eqn)).invars, strict=True)
    return [v for v, inner in pairs if inner in found]


_Rule: TypeAlias = Callable[[Normalizers, JaxprEqn], Found]


def _passed(it: Normalizers, eqn: JaxprEqn) -> Found:
    return it.exceeded(eqn.invars[0])


def _of_largest(it: Normalizers, eqn: JaxprEqn) -> Found:
    return _NONE.union(*[it.held(v, _MOVES) | it.exceeded(v) for v in eqn.invars])


def _of_cases(it: Normalizers, eqn: JaxprEqn) -> Found:
    return _NONE.union(*map(it.exceeded, eqn.invars[1:]))


def _of_sum(it: Normalizers, eqn: JaxprEqn) -> Found:
    # `m + log(sum(exp(x - m)))`, or a number of the program beside the largest.
    a, b = eqn.invars
    found = _NONE
    for v, other in ((a, b), (b, a)):
        if isinstance(other, Literal) or it.made_by(other) in _LOGS:
            found |= it.exceeded(v)
    return found


def _of_log(it: Normalizers, eqn: JaxprEqn) -> Found:
    maker, has_sum = it.maker(eqn.invars[0]), False
    while maker is not None and maker.primitive.name in _SUMS_UP:
        has_sum |= maker.primitive.name == "reduce_sum"
        maker = it.maker(maker.invars[0])
    if maker is None or not has_sum or maker.primitive.name != "exp":
        return _NONE
    return it.held(maker.invars[0], _MOVES)


_EXCEEDS: Mapping[str, _Rule] = {
    **dict.fromkeys(_MOVES, _passed),
    **dict.fromkeys(("reduce_max", "cummax", "max", "pmax", "reduce_window_max"), _of_largest),
    "select_n": _of_cases,
    "add": _of_sum,
    "log": _of_log,
}
"""How a primitive makes what is not below other arrays; of a call the body says it."""
