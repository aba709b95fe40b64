"""Marks: forward facts about how a value is computed, as one table.

Marks do not depend on dtypes. Each row of `ROWS` has a mark, primitives whose results may have it,
and a function that returns the mark of a result from the operands.

**Chains.** A value that is added to again and again is an accumulator: the residual stream of a
transformer, the state of an integrator, a sum over experts. In 16 bits each sum rounds the whole
value, however small the branch is: a bfloat16 stream lost 86 to 97 % of 24 branches of 1e-3
(`python -m tests.scenarios.chains`). So the planner computes accumulators in float32, in loops and
unrolled, for any initial value and any scale of the branches. A single sum (a bias, ``q + k``)
is no chain. Neither is the stream of a convolutional network, a sum of unscaled convolutions:
memory traffic limits its speed, and a batch norm gives each branch the size of the stream (PyTorch
and ``dtype=`` by hand keep it in 16 bits, too).

In a chain of products, the relative errors of all factors add up: from the third product on, the
factors are raised to float32 (`needs`, SHARP).

**Bounds.** An `exp` is at most 1 if its operand is at most 0, as in a softmax, which subtracts the
maximum of a row first. Without a bound, float16 overflows from `exp(11.1)` on, and no normalization
after a product helps: `exp(s) @ v / exp(s).sum()` was infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...policies import DEFAULT_RULES, FULL_POLICIES, CastPolicy
from ..compat import JaxprEqn, Literal, assumed_size, aval_of
from ..primitives.reading import exponent, is_norm, reduction_depth
from ..primitives.traits import BACKWARD, FOLDS, having
from .avals import at_least, element_count, is_as_large

_SUMS = having("sums") | {"sub"}
_CHEAP = having("feeds") | having("rounds")
REARRANGES = having("moves") | {"convert_element_type"}
_JOINS = having("joins")
_SCALES = frozenset(("mul", "div"))
_EXP = frozenset(("exp", "exp2"))
# A function with a slope of at most 1/4 ends all marks of its operand.
_OF_ELEMENTS = _JOINS | {name for name, words in BACKWARD.items() if "elementwise" in words}
_OF_ELEMENTS -= having("damps")
_ADDS_UP = frozenset(("reduce_sum", "reduce_window_sum"))
_PICKS = having("picks")
_SNAPS = having("snaps") | {"sign"}
_KEEPS_WHOLE = having("affine") | having("rounds") | having("chooses") | _ADDS_UP
_KEEPS_WHOLE |= {"square", "integer_pow", "pow", "exp2", "cumsum"}
_WIDE = frozenset(name for name, rule in DEFAULT_RULES.items() if rule in FULL_POLICIES)
_PROMOTES = frozenset(n for n, rule in DEFAULT_RULES.items() if rule is CastPolicy.PROMOTE)
_PROMOTES = (_PROMOTES | {"div", "integer_pow"}) - REARRANGES
MOST_FACTORS = 2
_OF_ALL = frozenset("convolved spread given fresh largest whole crowded fixed averaged".split())


class Marks(NamedTuple):
    """How a value is computed; "since then" names the operations that keep a mark.

    Args:
        summed: A sum of two computed values of the result's size; since then only cheap operations.
        factors: The number of products of values of the result's size behind it, up to two.
        convolved: 2 for the result of a convolution; since then only elementwise operations. 1 if
            a given factor scales it, and nothing has shifted it since: it may be small beside
            other summands.
        spread: The number of elements before a broadcast, as of a bias; 0 without a broadcast.
        given: 1 for an input or a constant of the program, or elements of one; 2 for a parameter; 3
            for a literal, or a function of literals alone.
        fresh: 2 for the result of a contraction; since then only moved or summed. 1 if it was
            scaled as well. A bias that is added to it is about as large.
        power: 2 for a square, 1 for a product of two values of the result's size or an outer
            product; since then only moved.
        squares: 2 for a sum of squares, even if scaled or summed with other values; 1 for its root.
        sums_powers: A contraction of values with `power`; since then only moved and scaled.
        crosses: 2 for a product of two averages, 1 for a product of two contractions or the square
            of one; since then only moved and scaled.
        counted: Positions: an `iota`, or the cumulative sum of one repeated value; since then only
            moved, scaled and shifted.
        gram: 2 for the contraction of an array with itself; since then only scaled, negated and
            added to others with this mark. 1 for its elements, picked or summed.
        bound: 1 if no element is far below 0, as of a square; -1 if none is far above 0, as of a
            value less the maximum of its row; 0 if neither is known. The sign of a literal.
        exponential: The `exp` of an unbounded value; since then only moved, masked, scaled by given
            values, contracted and added to others with this mark or to an accumulator. It exceeds
            float16 from `exp(11.1)` on.
        largest: The maximum of a row; since then only moved, chosen or added to. A value less its
            row's maximum is at most 0.
        images: For an input of a body: the numbers of the arrays of which it is an image, each with
            how it is computed from the array (`images`).
        whole: Numbers without a fraction, cast from integers or rounded to them; since then only
            moved, chosen, added up and multiplied with others with this mark.
        crowded: 2 for the result of a function with limits, such as a sigmoid, 1 for that of a wave
            or a root, whose results are near each other where its operands are not; since then
            only moved, chosen, scaled by given values and shifted.
        fixed: 1 if the value depends on no input; 2 for a constant whose elements add up to 0.
        averaged: 2 for a sum of elements or a contraction with a fixed operand, 1 for any other
            contraction; since then only moved and scaled.
        wide: The result of a function that runs in float32, such as a mean; since then only
            elementwise operations and moves.
    """

    summed: bool = False
    factors: int = 0
    convolved: int = 0
    spread: int = 0
    given: int = 0
    fresh: int = 0
    power: int = 0
    squares: int = 0
    sums_powers: bool = False
    crosses: int = 0
    counted: bool = False
    gram: int = 0
    bound: int = 0
    exponential: bool = False
    largest: bool = False
    images: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    crowded: int = 0
    fixed: int = 0
    averaged: int = 0
    wide: bool = False

    @classmethod
    def union(cls, several: Sequence[Marks]) -> Marks:
        """Returns each mark that any of several values has; a mark in `_OF_ALL` needs all."""
        found = zip(cls._fields, zip(*several, strict=True), strict=True)
        marks = cls(**{name: (min if name in _OF_ALL else max)(values) for name, values in found})
        return marks if len({m.bound for m in several}) == 1 else marks._replace(bound=0)


NONE = Marks()
GIVEN = Marks(given=1)
PARAMETER = Marks(given=2)
CONSTANT = Marks(given=1, fixed=1)
STENCIL = Marks(given=1, fixed=2)
NUMBER = Marks(given=3, fixed=1)
COUNTED = Marks(counted=True, whole=True)


def full_size(eqn: JaxprEqn, marks: Sequence[Marks]) -> list[int]:
    """Returns the positions of operands with the result's shape that are not broadcasts.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
    """
    shape = getattr(eqn.outvars[0].aval, "shape", None)  # a token has no shape
    return [
        i
        for i, (v, m) in enumerate(zip(eqn.invars, marks, strict=True))
        if getattr(v.aval, "shape", None) == shape and not m.spread and not isinstance(v, Literal)
    ]


def _adds_two(eqn: JaxprEqn, marks: Sequence[Marks]) -> bool:
    """Whether an equation is a sum or difference of two values of its size."""
    return eqn.primitive.name in _SUMS and len(full_size(eqn, marks)) == 2


def _is_convolved(summands: Sequence[Marks]) -> bool:
    """Whether all summands are results of convolutions, and none is scaled."""
    return all(m.convolved == 2 for m in summands)


def adds(eqn: JaxprEqn, marks: Sequence[Marks]) -> bool:
    """Returns whether an equation is a sum in a chain."""
    # An input or a constant belongs to no chain: in a batch of one example, the bias of `h @ w + b`
    # has the size of the product.
    is_given = any([m.given for m in marks])
    return not is_given and _adds_two(eqn, marks) and not _is_convolved(marks)


def is_stream(eqn: JaxprEqn, marks: Sequence[Marks], of_all: bool) -> bool:
    """Returns whether an equation is a sum in a residual stream that is 16 bits by intent.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        of_all: Level "compute" is in force: any sum of two values of its size counts, unless one is
            a parameter, as a bias or a learned position is. At other levels only a sum in the
            stream of a convolutional network counts.
    """
    if not _adds_two(eqn, marks) or (of_all and eqn.primitive.name == "sub"):
        return False
    if of_all:
        return not any([m.fixed or m.given > GIVEN.given for m in marks])
    return _is_convolved(marks)


class Operands(NamedTuple):
    """The operands of an equation.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        large: The positions of operands with the result's shape that are not broadcasts.
    """

    eqn: JaxprEqn
    marks: Sequence[Marks]
    large: Sequence[int]

    @property
    def name(self) -> str:
        """The name of the equation's primitive."""
        return self.eqn.primitive.name

    @property
    def cases(self) -> range:
        """The positions of all operands but the predicate of a select."""
        return range(self.name == "select_n", len(self.marks))

    def bound(self, i: int) -> int:
        """Returns the bound of an operand."""
        # A scalar without a bound is taken to be positive, as most scales are, and so is a factor
        # that is broadcast.
        is_scale = self.name in _SCALES and i not in self.large
        is_scale = is_scale or at_least(1, element_count(self.eqn.invars[i]))
        return self.marks[i].bound or int(is_scale)


# --- how the marks of operands are joined -------------------------------------------------------


def _always(it: Operands, mark: str) -> bool:
    return True


def _most(it: Operands, mark: str) -> int:
    return max([getattr(m, mark) for m in it.marks])


def _scaled_by_given(it: Operands, mark: str) -> int:
    return _most(it, mark) if any([m.given for m in it.marks]) else 0


def _scaled(it: Operands, mark: str) -> int:
    # A dividend keeps its marks even if the divisor is computed, as a count or a degree is.
    if it.name == "div":
        return getattr(it.marks[0], mark)
    # A computed row scales as well, such as the inverse of a degree.
    if it.name == "mul" and len(it.large) == 1 and not any([m.given for m in it.marks]):
        return getattr(it.marks[it.large[0]], mark)
    return _most(it, mark) if it.name in _JOINS else _scaled_by_given(it, mark)


def _least_computed(it: Operands, mark: str) -> int:
    # In `where(eye, gram, 0)` the number 0 has no mark, and the result has that of `gram`.
    return min([getattr(it.marks[i], mark) for i in it.cases if not it.marks[i].given], default=0)


def _unbounded_cases(it: Operands, mark: str) -> bool:
    # All cases need the mark: in `where(x > 0, x, exp(x) - 1)` the condition bounds the `exp`. An
    # accumulator to which a loop adds an `exp` does not, as it begins without one.
    large = [it.marks[i] for i in it.cases if i in it.large]
    return any([m.exponential for m in large]) and all([m.exponential or m.summed for m in large])


# --- chains -------------------------------------------------------------------------------------


def _factors(it: Operands, mark: str) -> int:
    if it.name != "mul" or len(it.large) != 2:
        return _most(it, mark)
    if it.eqn.invars[0] is it.eqn.invars[1]:  # a square is no chain of products
        return 0
    return min(MOST_FACTORS, 1 + max([it.marks[i].factors for i in it.large]))


def _convolved(it: Operands, mark: str) -> int:
    least = min([it.marks[i].convolved for i in it.large], default=0)
    small = [bool(m.given) for i, m in enumerate(it.marks) if i not in it.large]
    if not small or it.name not in _SCALES | {"add", "sub"}:
        return least
    is_scaled = it.name in _SCALES and any(small)
    return min(2 * least, 2 - is_scaled)


# --- squares ------------------------------------------------------------------------------------


def _power(it: Operands, mark: str) -> int:
    if it.name == "square" or exponent(it.eqn) == 2:
        return 2
    if it.name != "mul":
        return 0
    # Two operands that are both smaller than the result make an outer product.
    return 2 if it.eqn.invars[0] is it.eqn.invars[1] else int(len(it.large) != 1)


def _squares(it: Operands, mark: str) -> int:
    squares = _most(it, mark)
    if it.name == "sqrt":
        return squares // 2
    if squares == 1:
        return 2 if _power(it, mark) == 2 else 0
    # `y * std` loses the mark: there the root of a sum of squares is a scale, and no distance.
    return _scaled(it, mark) if it.name in _SCALES else squares


def _crosses(it: Operands, mark: str) -> int:
    least = min([m.averaged for m in it.marks])
    is_cross = _power(it, mark) or (it.name == "mul" and least == 2)
    return max(least if is_cross else 0, _scaled(it, mark))


# --- positions and whole numbers ----------------------------------------------------------------


def _counted(it: Operands, mark: str) -> bool:
    """Whether the operands are positions and numbers that shift or scale them, and no data."""
    pairs = list(zip(it.eqn.invars, it.marks, strict=True))[it.name == "select_n" :]
    others = [v for v, m in pairs if not m.counted]
    are_numbers = all([isinstance(v, Literal) or at_least(1, element_count(v)) for v in others])
    return len(others) < len(pairs) and are_numbers


def _whole(it: Operands, mark: str) -> bool:
    pairs = zip(it.eqn.invars, it.marks, strict=True)
    floats = [m.whole for v, m in pairs if jnp.issubdtype(aval_of(v).dtype, jnp.floating)]
    return bool(floats) and all(floats)


# --- bounds -------------------------------------------------------------------------------------


def _ended(it: Operands, mark: str) -> int:
    # A `max` or a `min` with a number, or with an operand that has this bound, has the bound.
    side = 1 if it.name == "max" else -1
    return side if len(it.large) < len(it.marks) or side in map(it.bound, it.cases) else 0


def _common(it: Operands, mark: str) -> int:
    # A value less the largest of its row is at most 0. A subtracted bias or mean bounds nothing.
    if it.name == "sub" and it.marks[1].largest:
        return -1
    # Only full-size operands decide the bound: a number that a mask inserts does not.
    large = [i for i in it.cases if i in it.large]
    bounds = {-it.bound(i) if i and it.name == "sub" else it.bound(i) for i in large}
    return bounds.pop() if len(bounds) == 1 else 0


def _masked_or_scaled(it: Operands, mark: str) -> bool:
    # Any other factor ends the mark: it may be a cotangent, or a computed row that normalizes.
    return bool(_most(it, mark)) and all(
        [
            m.exponential or m.given or (i in it.large and it.bound(i) > 0)
            for i, m in enumerate(it.marks)
        ]
    )


def _by_given(it: Operands, mark: str) -> bool:
    return it.marks[0].exponential and bool(it.marks[1].given)


# --- the table ----------------------------------------------------------------------------------


class Row(NamedTuple):
    """A mark, and the primitives whose results may have it.

    Args:
        mark: The name of the mark.
        primitives: The names of the primitives.
        value: Returns the mark of a result, from the operands and the mark's name.
    """

    mark: str
    primitives: Iterable[str]
    value: Callable[[Operands, str], int] = _most


ROWS = (
    Row("summed", _CHEAP, lambda it, mark: _most(it, mark) or adds(it.eqn, it.marks)),
    Row("factors", _CHEAP, _factors),
    Row("convolved", _OF_ELEMENTS, _convolved),
    Row("spread", _CHEAP, lambda it, mark: min([m.spread for m in it.marks])),
    Row("fresh", having("shifts") | {"neg", "select_n", "concatenate"}),
    Row("fresh", _SCALES, lambda it, mark: min(1, _scaled_by_given(it, mark))),
    Row("power", ("square", "integer_pow", "mul"), _power),
    Row("squares", _CHEAP | {"sqrt"}, _squares),
    Row("sums_powers", _SCALES | _JOINS, _scaled),
    Row("averaged", _SCALES | _JOINS, _scaled),
    Row("crosses", _SCALES | {"square", "integer_pow"}, _crosses),
    Row("gram", _SCALES | _SUMS | {"neg", "select_n"}, _least_computed),
    Row("counted", having("affine") | {"rem", "floor", "sign", "integer_pow"}, _counted),
    Row("wide", _WIDE, _always),
    Row("wide", _PROMOTES),
    Row("whole", _SNAPS, _always),
    Row("whole", _KEEPS_WHOLE - _SNAPS - {"div"}, _whole),
    Row("crowded", having("turns") | {"sqrt"}, _always),
    Row("crowded", having("saturates"), lambda it, _: 2),
    Row("crowded", _SCALES, _scaled_by_given),
    Row("crowded", having("shifts") | having("fuses") - REARRANGES),
    Row("largest", ("reduce_max", "cummax", "pmax", "reduce_window_max"), _always),
    Row("largest", ("max", "add", "select_n")),
    Row("bound", (*_EXP, "abs", "sqrt"), _always),
    Row("bound", ("neg",), lambda it, _: -it.bound(0)),
    Row("bound", ("mul", "div"), lambda it, _: it.bound(0) * it.bound(1)),
    Row("bound", ("square", "integer_pow", "mul"), lambda it, mark: _power(it, mark) // 2),
    Row("bound", ("max", "min", "clamp"), _ended),
    Row("bound", _SUMS | {"select_n"}, _common),
    Row("exponential", _EXP, lambda it, _: it.bound(0) >= 0),
    Row("exponential", _JOINS),
    Row("exponential", having("shifts") | {"neg", "select_n"}, _unbounded_cases),
    Row("exponential", ("mul",), _masked_or_scaled),
    Row("exponential", ("div",), _by_given),
)
_ROWS_OF: dict[str, list[Row]] = {}
for _row in ROWS:
    for _name in _row.primitives:
        _ROWS_OF.setdefault(_name, []).append(_row)


def marks_of_result(eqn: JaxprEqn, marks: Sequence[Marks]) -> Marks:
    """Returns the marks of the results of an equation that is no contraction and has no bodies.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
    """
    name = eqn.primitive.name
    if (found := _of_one_array(eqn, marks)) is not None:
        return found
    if len(eqn.outvars) != 1:
        return NONE
    if name in FOLDS and all([m.given == NUMBER.given for m in marks]):
        return NUMBER
    it = Operands(eqn, marks, full_size(eqn, marks))
    rows = _ROWS_OF.get(name, ())
    # Of several rows with one mark, the last one that returns a mark decides.
    made: dict[str, Any] = {row.mark: m for row in rows if (m := row.value(it, row.mark))}
    return Marks(**made)


def _of_one_array(eqn: JaxprEqn, marks: Sequence[Marks]) -> Marks | None:
    """Returns the marks of an `iota`, or of one array that is moved, cast, spread or added up."""
    name = eqn.primitive.name
    if name == "iota":
        return COUNTED
    if not marks:
        return None
    m = marks[0]
    if name == "broadcast_in_dim" and not is_as_large(eqn.invars[0], eqn.outvars[0]):
        spread = m.spread or assumed_size(element_count(eqn.invars[0]))
        return m._replace(summed=False, factors=0, spread=spread)
    if name == "cumsum":
        return COUNTED if m.spread or m.counted else Marks(whole=m.whole, wide=True)
    if name in _ADDS_UP:
        found = Marks(squares=2) if m.power == 2 else Marks(averaged=2)
        return found._replace(gram=min(1, m.gram), bound=m.bound, whole=m.whole, wide=True)
    if name in _PICKS and m.spread and at_least(m.spread, element_count(eqn.outvars[0])):
        # The pick may take each repeated element once: its result counts as not broadcast.
        m = m._replace(spread=0)
    if name in _PICKS and m.gram:
        return m._replace(gram=1)
    if name == "convert_element_type":
        dtype = aval_of(eqn.invars[0]).dtype
        if jnp.issubdtype(dtype, jnp.bool_):
            return Marks(bound=1, whole=True)
        if jnp.issubdtype(dtype, jnp.integer):
            return m._replace(whole=True)
    return m if name in REARRANGES else None


def marks_of_contraction(eqn: JaxprEqn, marks: Sequence[Marks], is_gram: bool) -> Marks:
    """Returns the marks of the result of a contraction.

    Args:
        eqn: The contraction.
        marks: The marks of its operands.
        is_gram: Both operands hold the elements of one array.
    """
    is_sum_of_squares, marks = is_norm(eqn), marks[:2]
    is_convolution = eqn.primitive.name == "conv_general_dilated"
    is_outer = int(at_least(1, reduction_depth(eqn)))
    return Marks(
        # A convolution that sums few elements is float32 (`needs.cannot_pay`), and no stream.
        convolved=2 if is_convolution and not at_least(4, reduction_depth(eqn)) else 0,
        fresh=2,
        power=is_outer,
        crosses=is_outer and min([m.averaged for m in marks]),
        squares=2 if is_sum_of_squares else 0,
        sums_powers=any([m.power or m.sums_powers for m in marks]),
        gram=2 if is_gram and not is_sum_of_squares else 0,
        bound=int(is_sum_of_squares),
        exponential=any([m.exponential for m in marks]),
        whole=all([m.whole for m in marks]),
        averaged=2 if any([m.fixed for m in marks]) else 1,
    )
