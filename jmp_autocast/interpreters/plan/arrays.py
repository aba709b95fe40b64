"""Which values hold elements of one array, and which array no element of another one exceeds.

`array` says of which array a value holds the elements, moved or cast; `held` also of which masked
or picked ones. `exceeded` says whose elements it is not below, as the largest of them, a maximum
with others, or the logarithm of the sum of their `exp`: what a softmax takes off before its `exp`.
A mean, a bias or a smallest element is below some: `exp(p - p.mean())` was infinite in float16.

All of it goes through calls: a body is told what its operands are of one another (`given`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, Var, body_of
from ..primitives.structure import STRUCTURES, Body, bodies, is_call
from ..primitives.traits import having

_PICKS = having("picks")
_REARRANGES = having("moves") | {"convert_element_type"}
_MOVES = _REARRANGES - _PICKS - having("travels")
_LOGS = frozenset(("log", "log1p"))
_SUMS_UP = _MOVES | {"reduce_sum", "add", "max", "abs"}
_LARGEST = frozenset(("reduce_max", "cummax", "max", "pmax", "reduce_window_max"))
# Of a value of more arrays nothing is known: a chain of a thousand masks would take their square.
_MOST = 64

Found: TypeAlias = frozenset[Var]
_NONE: Found = frozenset()


class Related(NamedTuple):
    """What an input of a body is of its other inputs.

    Args:
        same: So many inputs before it one stands that holds the elements of the same array, moved;
            0 for none.
        above: So many inputs behind it (before it, if negative) those stand of which no element
            exceeds it.
    """

    same: int = 0
    above: tuple[int, ...] = ()


UNRELATED = Related()


def arrays_of(jaxpr: Jaxpr, inputs: Sequence[Related], memo: dict[Any, Any]) -> Arrays:
    """Returns what is known of a jaxpr, found out once.

    Args:
        jaxpr: An open jaxpr.
        inputs: What each input is of the others.
        memo: What is known already; who owns it keeps the jaxprs alive.
    """
    key = "arrays", id(jaxpr), tuple(inputs)
    if key not in memo:
        memo[key] = Arrays(jaxpr, inputs, memo)
    return memo[key]


class Arrays:
    """What is known of one jaxpr; what exceeds what is looked for when it is first asked.

    Args:
        jaxpr: An open jaxpr.
        inputs: As for `arrays_of`.
        memo: As for `arrays_of`.
    """

    def __init__(self, jaxpr: Jaxpr, inputs: Sequence[Related], memo: dict[Any, Any]) -> None:
        self.jaxpr = jaxpr
        self._memo = memo
        self._inputs = list(zip(jaxpr.invars, inputs, strict=True))
        self._given: dict[int, Sequence[Related]] = {}
        self._array: dict[Var, Atom] = {}
        self._makers: dict[Var, JaxprEqn] = {}
        # Where there is no entry, a value holds its own elements, and is not below no others.
        self._moved: dict[Var, Found] = {}
        self._held: dict[Var, Found] = {}
        self._exceeded: dict[Var, Found] = {}
        self._is_swept = False
        self.has_largest: bool = any([related.above for related in inputs])
        for i, (v, related) in enumerate(self._inputs):
            if 0 < related.same <= i:
                self._array[v] = jaxpr.invars[i - related.same]
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            self.has_largest |= name in _LARGEST
            if name in _REARRANGES:
                self._array[eqn.outvars[0]] = eqn.invars[0]
            elif name in STRUCTURES and (body := _once(eqn)) is not None:
                self._array_through(eqn, body)

    def _array_through(self, eqn: JaxprEqn, body: Body) -> None:
        inner = arrays_of(body_of(body.jaxpr), [UNRELATED] * len(body.operands), self._memo)
        self.has_largest |= inner.has_largest
        outer = _outside(eqn, body)
        for r, result in zip(body.results, inner.jaxpr.outvars, strict=True):
            array = inner.array(result)
            if r is not None and not isinstance(array, Literal):
                # An array of the body alone goes by the name of the first result that holds it.
                v = outer.setdefault(array, eqn.outvars[r])
                if v is not eqn.outvars[r]:
                    self._array[eqn.outvars[r]] = v

    def array(self, atom: Atom) -> Atom:
        """Returns the array of which an atom holds the elements, moved or cast, itself if none."""
        while not isinstance(atom, Literal) and atom in self._array:
            atom = self._array[atom]
        return atom

    def given(self, eqn: JaxprEqn) -> Sequence[Related]:
        """Returns what each operand of a call or a loop is of the others.

        Args:
            eqn: The call or the loop.
        """
        if id(eqn) not in self._given:
            found = [UNRELATED] * len(eqn.invars)
            for body in bodies(eqn):
                carried = {body.operands[k] for k in body.carried}
                stay = [i for i in body.operands if i not in carried]
                # They are counted as inputs: those of a linear solve do not stand as its operands.
                if stay and stay == list(range(stay[0], stay[0] + len(stay))):
                    # Slices of an array are rows of it, and of what is transposed they are none.
                    fixed = body.operands[: body.fixed] if body.repeats > 1 else stay
                    self._relate(eqn, stay, fixed, found)
            self._given[id(eqn)] = found
        return self._given[id(eqn)]

    def _relate(
        self, eqn: JaxprEqn, stay: Sequence[int], fixed: Sequence[int], found: list[Related]
    ) -> None:
        first = dict[Var, int]()
        for i in stay:
            v = eqn.invars[i]
            array = self.array(v) if i in fixed else v
            if isinstance(array, Literal):
                continue
            largest = self.exceeded(v) if self.has_largest and i in fixed else _NONE
            others = fixed if largest else ()
            above = [k - i for k in others if not largest.isdisjoint(self.held(eqn.invars[k]))]
            found[i] = Related(i - first.setdefault(array, i), tuple(above))

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
        body = _once(eqn) if is_call(eqn) else None
        if body is None:
            return eqn.primitive.name
        inner = self._inside(eqn, body)
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

    def _swept(self) -> Arrays:
        if not self._is_swept:
            self._is_swept = True  # what an equation reads stands before it
            inputs = self.jaxpr.invars
            for i, (v, related) in enumerate(self._inputs):
                # What is the same may be a part of it, whose largest element is not that of all.
                if related.above:
                    self._exceeded[v] = frozenset([inputs[i + k] for k in related.above])
            for eqn in self.jaxpr.eqns:
                self._look_at(eqn)
        return self

    def _look_at(self, eqn: JaxprEqn) -> None:
        self._makers.update(dict.fromkeys(eqn.outvars, eqn))
        name, read = eqn.primitive.name, eqn.invars
        if name in STRUCTURES:
            if (body := _once(eqn)) is not None:
                self._look_into(eqn, body)
            return
        cases = read[1:] if name == "select_n" else read[:1]
        for v in eqn.outvars:
            if name in _MOVES or name == "select_n":
                self._moved[v] = _joined(_one(v), map(self.moved, cases))
            if name in _MOVES or name in _PICKS or name == "select_n":
                self._held[v] = _joined(_one(v), map(self.held, cases))
            if (rule := _EXCEEDS.get(name)) and (found := rule(self, eqn)):
                self._exceeded[v] = found

    def _look_into(self, eqn: JaxprEqn, body: Body) -> None:
        inner, outer = self._inside(eqn, body), _outside(eqn, body)
        pairs = zip(body.results, inner.jaxpr.outvars, strict=True)
        results = [(eqn.outvars[r], result) for r, result in pairs if r is not None]

        def outside(found: Found) -> list[Atom]:
            return [outer[v] for v in found if v in outer]

        for v, result in results:
            moved, largest = inner.moved(result), inner.exceeded(result)
            self._moved[v] = _joined(_one(v), map(self.moved, outside(moved)))
            self._held[v] = _joined(_one(v), map(self.held, outside(inner.held(result))))
            found = [*map(self.moved, outside(largest))]
            found += map(self.exceeded, outside(largest | moved))
            beside = [w for w, other in results if not largest.isdisjoint(inner.held(other))]
            self._exceeded[v] = _joined(frozenset(beside), found)

    def _inside(self, eqn: JaxprEqn, body: Body) -> Arrays:
        given = self.given(eqn)
        return arrays_of(body_of(body.jaxpr), [given[i] for i in body.operands], self._memo)


def _once(eqn: JaxprEqn) -> Body | None:
    """Returns the body of a call, or of a loop of one step; None for anything else."""
    held = bodies(eqn)
    return held[0] if len(held) == 1 and held[0].repeats == 1 else None


def _outside(eqn: JaxprEqn, body: Body) -> dict[Var, Atom]:
    """Returns what the inputs of a body are outside: operands."""
    inputs = body_of(body.jaxpr).invars
    return dict(zip(inputs, [eqn.invars[i] for i in body.operands], strict=True))


def _one(v: Var) -> Found:
    return frozenset((v,))


def _joined(own: Found, others: Iterable[Found]) -> Found:
    found = own.union(*others)
    return found if len(found) <= _MOST else own


_Rule: TypeAlias = Callable[[Arrays, JaxprEqn], Found]


def _passed(it: Arrays, eqn: JaxprEqn) -> Found:
    return it.exceeded(eqn.invars[0])


def _of_largest(it: Arrays, eqn: JaxprEqn) -> Found:
    return _joined(_NONE, [*map(it.moved, eqn.invars), *map(it.exceeded, eqn.invars)])


def _of_cases(it: Arrays, eqn: JaxprEqn) -> Found:
    return _joined(_NONE, map(it.exceeded, eqn.invars[1:]))


def _of_sum(it: Arrays, eqn: JaxprEqn) -> Found:
    # `m + log(sum(exp(x - m)))`, or a number of the program beside the largest.
    a, b = eqn.invars
    found = [
        it.exceeded(v)
        for v, other in ((a, b), (b, a))
        if isinstance(other, Literal) or it.made_by(other) in _LOGS
    ]
    return _joined(_NONE, found)


def _of_log(it: Arrays, eqn: JaxprEqn) -> Found:
    maker, has_sum = it.maker(eqn.invars[0]), False
    while maker is not None and maker.primitive.name in _SUMS_UP:
        has_sum |= maker.primitive.name == "reduce_sum"
        maker = it.maker(maker.invars[0])
    if maker is None or not has_sum or maker.primitive.name != "exp":
        return _NONE
    return it.moved(maker.invars[0])


_EXCEEDS: Mapping[str, _Rule] = {
    **dict.fromkeys(_MOVES, _passed),
    **dict.fromkeys(_LARGEST, _of_largest),
    "select_n": _of_cases,
    "add": _of_sum,
    "log": _of_log,
}
"""How a primitive makes what is not below other arrays; of a call the body says it."""
