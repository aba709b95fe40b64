"""Sign bounds, and which values are unnormalized exponentials: rules as rows.

An `exp` is at most 1 if its operand is at most 0, as in a softmax, which subtracts the maximum of a
row first. Without a bound, float16 overflows from `exp(11.1)` on, and no normalization after a
product helps: `exp(s) @ v / exp(s).sum()` was infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..compat import JaxprEqn
from ..primitives.reading import exponent
from ..primitives.traits import having
from .symbolic_sizes import at_least, element_count


class Operands(NamedTuple):
    """Facts about the operands of an equation, one for each.

    Args:
        eqn: The equation.
        bounds: 1 if no element is far below 0, -1 if none is far above it, else 0; the sign of a
            literal.
        made: Their `Marks`.
        large: Which are as large as the result, by their positions.
    """

    eqn: JaxprEqn
    bounds: Sequence[int]
    made: Sequence[Any]
    large: Sequence[int]


def _at_least_0(it: Operands) -> int:
    return 1


def _of_power(it: Operands) -> int:
    return int(exponent(it.eqn) == 2)


def _negated(it: Operands) -> int:
    # Factors are assumed to be positive.
    return -(it.bounds[0] or int(at_least(1, element_count(it.eqn.invars[0]))))


def _ended_at(side: int) -> Callable[[Operands], int]:
    def rule(it: Operands) -> int:
        # A small operand is such a bound, and so is a full-size one with this bound.
        return side if len(it.large) < len(it.bounds) or side in it.bounds else 0

    return rule


def _scaled(it: Operands) -> int:
    a, b = (x if i in it.large else x or 1 for i, x in enumerate(it.bounds))
    return a * b


def _multiplied(it: Operands) -> int:
    a, b = it.eqn.invars
    return 1 if a is b else _scaled(it)


def _added(it: Operands) -> int:
    return _common([it.bounds[i] for i in it.large])


def _subtracted(it: Operands) -> int:
    # The maximum of a row, or the logarithm of its sum, bounds the row; a bias or a mean does not.
    if it.made[1].largest:
        return -1
    # The decay since an earlier position; a mask removes the later ones.
    if all([m.fallen for m in it.made]):
        return -1
    return _common([-it.bounds[i] if i else it.bounds[i] for i in it.large])


def _common(bounds: Sequence[int]) -> int:
    return next(iter(bounds)) if len(set(bounds)) == 1 else 0


def _chosen(it: Operands) -> int:
    # A mask inserts a constant among the values; NaN does not count as a value.
    if it.made[0].is_nan:
        return it.bounds[1]
    return _common([it.bounds[i] for i in it.large if i] or it.bounds[1:])


BOUNDS: Mapping[str, Callable[[Operands], int]] = MappingProxyType(
    {
        **dict.fromkeys(("exp", "exp2", "abs", "sqrt", "square"), _at_least_0),
        "integer_pow": _of_power,
        **dict.fromkeys(("log1p", "cumsum"), lambda it: it.bounds[0]),
        "neg": _negated,
        "max": _ended_at(1),
        **dict.fromkeys(("min", "clamp"), _ended_at(-1)),
        "mul": _multiplied,
        "div": _scaled,
        **dict.fromkeys(having("sums"), _added),
        "sub": _subtracted,
        "select_n": _chosen,
    }
)
"""On which side of 0 a result ends, by the primitive; of any other nothing is known."""


def _all_large(it: Operands) -> bool:
    return bool(it.large) and all([it.made[i].exponential for i in it.large])


def _all_cases(it: Operands) -> bool:
    # In `where(x > 0, x, exp(x) - 1)` each branch holds its own range.
    return _all_large(it._replace(large=[i for i in it.large if i]))


def _masked_or_scaled(it: Operands) -> bool:
    # A computed row, or a cotangent, normalizes.
    return all(
        [
            m.exponential or m.given or (bound > 0 and i in it.large)
            for i, (m, bound) in enumerate(zip(it.made, it.bounds, strict=True))
        ]
    )


# Functions that return whether the result is an unbounded exponential, given operands of which some
# are.
_STAYS: Mapping[str, Callable[[Operands], bool]] = MappingProxyType(
    {
        **dict.fromkeys(having("shifts") | {"neg"}, _all_large),
        "select_n": _all_cases,
        **dict.fromkeys(having("joins"), lambda it: any([m.exponential for m in it.made])),
        "mul": _masked_or_scaled,
        "div": lambda it: it.made[0].exponential and bool(it.made[1].given),
    }
)


def is_exponential(it: Operands) -> bool:
    """Returns whether the result of an equation is an `exp` without a bound.

    Args:
        it: The facts about its operands.
    """
    name = it.eqn.primitive.name
    if name in ("exp", "exp2"):
        return it.bounds[0] >= 0
    rule = _STAYS.get(name) if any([m.exponential for m in it.made]) else None
    return rule is not None and rule(it)
