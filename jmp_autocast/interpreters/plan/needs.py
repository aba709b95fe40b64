"""What the readers of a value need of it, in whatever dtype they run: one sweep, last to first.

A need does not depend on dtypes: it is known before anything is decided, and enters and leaves a
call like any other reader. Each row says who asks, and through what the need passes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..compat import Literal, body_of, variables_in
from ..primitives.complements import subtracted_from_one
from ..primitives.reading import casts_to_integer, exponent, takes_every_other
from ..primitives.structure import STRUCTURES, Body, bodies
from ..primitives.traits import having
from .loop_carries import accumulating_carries


class Need(enum.IntFlag):
    """What a value is read for."""

    POLE = enum.auto()
    NEAR_1 = enum.auto()
    FACTOR = enum.auto()
    SNAP = enum.auto()
    PRODUCT = enum.auto()
    NEIGHBOR = enum.auto()
    CANCELS = enum.auto()


NOTHING = Need(0)
LOST = Need.POLE | Need.FACTOR | Need.NEIGHBOR
GUARDED = LOST | Need.NEAR_1
HARMED = GUARDED | Need.SNAP
FACTORED = Need.NEIGHBOR

_CHEAP = having("feeds") | having("rounds")
_POLE_AT_0, _POLE_AT_1 = having("log0"), having("div1")
_MULTIPLIES_ALL = frozenset(("cumprod", "reduce_prod"))
_KEEPS_NEAR_1 = _MULTIPLIES_ALL | {"reduce_sum", "cumsum", "reduce_window_sum", "sqrt"}


def _poles(eqn: Any, carries: frozenset[Any]) -> Sequence[Any]:
    if eqn.primitive.name in _POLE_AT_0 or (exponent(eqn) or 0) < 0:
        return eqn.invars[:1]
    return eqn.invars[1:] if eqn.primitive.name in _POLE_AT_1 else ()


def _decays(eqn: Any, carries: frozenset[Any]) -> Sequence[Any]:
    if eqn.primitive.name != "mul":
        return eqn.invars[:1]
    pairs = zip(eqn.invars, reversed(eqn.invars), strict=True)
    return [v for v, other in pairs if not isinstance(other, Literal) and other in carries]


class Row(NamedTuple):
    """Who asks for a need of which operands, and through which primitives it passes."""

    need: Need
    primitives: frozenset[str]
    operands: Callable[[Any, frozenset[Any]], Sequence[Any]]
    through: frozenset[str] = _CHEAP


ROWS = (
    Row(Need.POLE, _POLE_AT_0 | _POLE_AT_1 | {"integer_pow"}, _poles),
    Row(
        Need.NEAR_1,
        frozenset(("sub",)),
        lambda eqn, _: eqn.invars[1:] if subtracted_from_one(eqn) is not None else (),
        _CHEAP | _KEEPS_NEAR_1,
    ),
    Row(Need.FACTOR, _MULTIPLIES_ALL | {"mul"}, _decays, _CHEAP | _KEEPS_NEAR_1),
    Row(Need.SNAP, having("snaps"), lambda eqn, _: eqn.invars),
    Row(
        Need.SNAP,
        frozenset(("convert_element_type", "bitcast_convert_type")),
        lambda eqn, _: eqn.invars if casts_to_integer(eqn) else (),
    ),
    Row(Need.PRODUCT, having("contracts"), lambda eqn, _: eqn.invars[:2]),
)
_ASKED: dict[str, list[Row]] = {}
_THROUGH: dict[str, Need] = {}
for _name in having("sums"):
    _THROUGH[_name] = Need.CANCELS
for _row in ROWS:
    for _name in _row.primitives:
        _ASKED.setdefault(_name, []).append(_row)
    for _name in _row.through:
        _THROUGH[_name] = _THROUGH.get(_name, NOTHING) | _row.need

Needs: TypeAlias = Mapping[Any, Need]
Memo: TypeAlias = dict[Any, Any]


def needs_of(
    jaxpr: Any, outputs: Sequence[Need], memo: Memo, carries: frozenset[Any] = frozenset()
) -> Needs:
    """Returns what each variable of a jaxpr is needed for, given what its outputs are."""
    key = id(jaxpr), tuple(outputs), carries
    if key in memo:
        return memo[key]
    needs: dict[Any, Need] = {}

    def add(atoms: Sequence[Any], need: Need) -> None:
        for v in variables_in(atoms):
            needs[v] = needs.get(v, NOTHING) | need

    products = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "mul"}
    for v, need in zip(jaxpr.outvars, outputs, strict=True):
        if need:
            add([v], need)
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        of_results = NOTHING
        for v in eqn.outvars:
            of_results |= needs.get(v, NOTHING)
        if passed := of_results & _THROUGH.get(name, NOTHING):
            add(eqn.invars, passed)
        if name == "sub" and not products.isdisjoint(variables_in(eqn.invars)):
            add(eqn.invars, Need.CANCELS)
        for row in _ASKED.get(name, ()):
            add(row.operands(eqn, carries), row.need)
        for body in bodies(eqn) if name in STRUCTURES else ():
            inner = body_of(body.jaxpr)
            returned = [
                NOTHING if r is None else needs.get(eqn.outvars[r], NOTHING) for r in body.results
            ]
            within = needs_of(inner, returned, memo, accumulated_in(body, memo))
            for i, v in zip(body.operands, inner.invars, strict=True):
                if v in within:
                    add([eqn.invars[i]], within[v])
    # `associative_scan` begins so: a product of neighbors.
    for v in _own_factors(jaxpr):
        needs[v] = needs.get(v, NOTHING) | Need.NEIGHBOR
    memo[key] = needs
    return needs


def _own_factors(jaxpr: Any) -> list[Any]:
    origins = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if takes_every_other(e)}
    products = [e.invars for e in jaxpr.eqns if e.primitive.name == "mul"] if origins else []
    pairs = [variables_in(factors) for factors in products]
    found = ((origins.get(v), origins.get(w)) for v, w in (p for p in pairs if len(p) == 2))
    return [v for v, w in found if v is not None and v is w]


def accumulated_in(body: Body, memo: Memo) -> frozenset[Any]:
    """Returns the inputs of a body that are carries of its loop which accumulate."""
    if not body.carries:
        return frozenset()
    jaxpr = body_of(body.jaxpr)
    if (key := ("accumulated", id(jaxpr), body.fixed)) not in memo:
        found = accumulating_carries(jaxpr, body.fixed, len(body.carries))
        memo[key] = frozenset(jaxpr.invars[body.fixed + k] for k in found)
    return memo[key]
