"""Marks: forward facts about a value that do not depend on dtypes, in one sweep from the first.

Marks describe how a value is computed. Like needs (`needs`) they are known before the plan, and
they enter and leave a call, a checkpoint or a branch as if it were inlined.

**Chains.** A value that is added to again and again is an accumulator: the residual stream of a
transformer, the state of an integrator, a sum over experts. In 16 bits each sum rounds the whole
value, however small the branch is: a bfloat16 stream lost 86 to 97 % of 24 branches of 1e-3
(`python -m tests.scenarios.chains`). So the planner computes accumulators in float32, in loops and
written out, for any initial value and any scale of the branches. One sum (a bias, ``q + k``) is no
chain. Neither is the stream of a convolutional network, a sum of unscaled convolutions: its traffic
is its speed, and a batch norm gives each branch the size of the stream (PyTorch and ``dtype=`` by
hand keep it in 16 bits, too).

The error of a product of many factors is that of its factors: those are raised, from the third
product on (`needs`, SHARP).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..compat import Atom, Jaxpr, JaxprEqn, Literal, assumed_size, aval_of, body_of
from ..primitives.reading import exponent, iota_length, is_norm, reduction_depth
from ..primitives.structure import STRUCTURES, Body, bodies, called, is_call
from ..primitives.traits import BACKWARD, FOLDS, having
from .bounds import BOUNDS, Operands, is_exponential
from .returning_carries import accumulating_carries
from .symbolic_sizes import at_least, element_count, is_as_large

_SUMS = having("sums") | {"sub"}
_CHEAP = having("feeds") | having("rounds")
_REARRANGES = having("moves") | {"convert_element_type"}
_CONTRACTS = having("contracts")
_SATURATES = having("saturates")
_DAMPS = having("damps")  # the result is no longer made element by element
_KEEPS_FRESH = having("shifts") | {"neg", "select_n", "concatenate"}
_JOINS = having("joins")
_KEEPS_COUNT = having("affine") | {"rem", "floor", "sign", "integer_pow"}
_OF_ELEMENTS = _JOINS | {name for name, words in BACKWARD.items() if "elementwise" in words}
_ADDS_UP = frozenset(("reduce_sum", "reduce_window_sum"))
_PICKS = having("picks")
MOST_FACTORS = 2
_OF_ALL = frozenset(
    """
    convolved spread given fresh largest fallen is_nan angle whole saturated fixed
    averaged
    """.split()
)
_SNAPS = having("snaps") | {"sign"}
_KEEPS_WHOLE = (having("affine") | having("rounds") | having("chooses") | _ADDS_UP) - _SNAPS - {
    "div"
} | {*("square", "integer_pow", "pow", "exp2", "cumsum")}
_LARGEST = frozenset(("reduce_max", "cummax", "pmax", "reduce_window_max"))


class Marks(NamedTuple):
    """How a value is computed.

    Args:
        summed: A sum of values of one size made it, since then only cheap operations.
        factors: So many products of values of its size made it, counted up to two.
        convolved: A convolution made it, since then only operations element by element.
        scaled: The last of those was a factor that is given: it may be small beside others.
        spread: So many smaller values are repeated in it: a bias.
        given: 1 for an input or a constant of the program, or elements of one; 2 for a parameter; 3
            for a literal, or a function of literals alone.
        fresh: 2 if a contraction made it, since then only moved or summed; 1 if it was scaled as
            well. A bias that is added to it is about as large.
        power: 2 if it was multiplied by itself, 1 if two values of its size were multiplied, since
            then only moved.
        squares: 2 for a sum of squares, scaled or summed with others; 1 for its root.
        sums_powers: A contraction of such products made it, since then only moved.
        crosses: It is a product of two contractions, or the square of one.
        added_up: A sum of its elements made it, since then only moved and scaled.
        of_sums: It is a product of two such sums, scaled.
        counted: Positions: an `iota` made it, or a cumulative sum of one value, since then only
            moved, scaled and shifted.
        gram: 2 if a product of one value with itself made it, since then only scaled, negated and
            added to such; 1 for elements of one, picked or summed.
        bound: 1 if no element is far below 0, -1 if none is far above it: the square of a value, or
            a value less the maximum of its row.
        exponential: The `exp` of an unbounded value, since then only moved, masked, scaled by given
            values, multiplied as a matrix and added to such: beyond float16 from `exp(11.1)` on.
        largest: A maximum of its elements, or the logarithm of a sum of them, made it, since then
            only moved, chosen or added to: a value less this one is at most 0.
        fallen: A cumulative sum of values of at most 0 made it, since then only moved: a later
            element less an earlier one is at most 0.
        is_nan: A comparison of a value with itself made it: a test for NaN.
        same: Of an input of a body: inputs with one number hold the elements of one array; 0 for
            none.
        angle: A cast of integers, or a function of such and of given values, element by element or
            by an outer product: positions times frequencies.
        whole: Numbers without a fraction: cast from integers or rounded to them, since then only
            moved, chosen, added up and multiplied with such.
        saturated: A function with limits, such as a sigmoid or a tanh, made it.
        fixed: It depends on no input.
        averaged: A contraction made it, since then only scaled: 2 with a fixed operand, 1 with
            others.
    """

    summed: bool = False
    factors: int = 0
    convolved: bool = False
    scaled: bool = False
    spread: int = 0
    given: int = 0
    fresh: int = 0
    power: int = 0
    squares: int = 0
    sums_powers: bool = False
    crosses: bool = False
    added_up: bool = False
    of_sums: bool = False
    counted: bool = False
    gram: int = 0
    bound: int = 0
    exponential: bool = False
    largest: bool = False
    fallen: bool = False
    is_nan: bool = False
    same: int = 0
    angle: bool = False
    whole: bool = False
    saturated: bool = False
    fixed: bool = False
    averaged: int = 0

    @classmethod
    def union(cls, several: Sequence[Marks]) -> Marks:
        """Returns the marks of any of several branches; marks that lower a value, of all."""
        found = zip(cls._fields, zip(*several, strict=True), strict=True)
        made = cls(**{name: (min if name in _OF_ALL else max)(values) for name, values in found})
        return made if len({m.bound for m in several}) == 1 else made._replace(bound=0)


NONE = Marks()
SUMMED = Marks(summed=True)
GIVEN = Marks(given=1)
PARAMETER = Marks(given=2)
CONSTANT = Marks(given=1, fixed=True)
NUMBER = Marks(given=3, fixed=True)
WHOLE_NUMBER = Marks(given=3, whole=True, fixed=True)
COUNTED = Marks(counted=True, angle=True, whole=True)
ANGLE = Marks(angle=True)
ADDED_UP = Marks(added_up=True)
BITS = Marks(bound=1, whole=True)
IS_NAN = Marks(is_nan=True)
_UNMARKED = (NONE, NUMBER, WHOLE_NUMBER)

Memo: TypeAlias = dict[Any, Any]
AllMarks: TypeAlias = Mapping[Any, Marks]


def marks_of(jaxpr: Jaxpr, inputs: Sequence[Marks], memo: Memo) -> AllMarks:
    """Returns the marks of each variable that has any.

    Args:
        jaxpr: An open jaxpr.
        inputs: The marks of its inputs.
        memo: A cache, whose owner keeps the jaxprs alive.
    """
    key = "marks", id(jaxpr), tuple(inputs)
    if key in memo:
        return memo[key]
    moved = moved_in(jaxpr, inputs, memo)
    alone = [m._replace(same=0) for m in inputs]
    marks = {v: m for v, m in zip(jaxpr.invars, alone, strict=True) if m != NONE}
    marks.update(dict.fromkeys(jaxpr.constvars, CONSTANT))
    for eqn in jaxpr.eqns:
        made = of(marks, eqn.invars)
        if eqn.primitive.name in STRUCTURES:
            found = _of_structure(eqn, given_to(eqn, marks, moved), memo)
        elif eqn.primitive.name in _CONTRACTS:
            found = [_of_contraction(eqn, made, moved)]
        else:
            found = [_of_equal(eqn, made, memo)] * len(eqn.outvars)
        if all([m.fixed for m in made]):
            found = [m._replace(fixed=True) for m in found]
        marks.update((v, m) for v, m in zip(eqn.outvars, found, strict=True) if m != NONE)
    memo[key] = marks
    return marks


def of(marks: AllMarks, atoms: Sequence[Atom]) -> list[Marks]:
    """Returns the marks of variables and literals."""
    return [_of_number(v) if isinstance(v, Literal) else marks.get(v, NONE) for v in atoms]


def _of_number(literal: Literal) -> Marks:
    val, dtype = literal.val, aval_of(literal).dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b") or np.iscomplexobj(val):
        return NUMBER
    is_whole = all([float(x).is_integer() for x in np.ravel(val)])
    return WHOLE_NUMBER if is_whole else NUMBER


def moved_in(jaxpr: Jaxpr, inputs: Sequence[Marks], memo: Memo) -> Mapping[Any, Atom]:
    """Returns the array that each moved or cast value of a jaxpr holds the elements of.

    Args:
        jaxpr: An open jaxpr.
        inputs: The marks of its inputs.
        memo: As for `marks_of`.
    """
    key = "moved", id(jaxpr), tuple([m.same for m in inputs])
    if key in memo:
        return memo[key]
    found: dict[Any, Atom] = {}
    first: dict[int, Atom] = {}
    for v, m in zip(jaxpr.invars, inputs, strict=True):
        if m.same:
            found[v] = first.setdefault(m.same, v)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _REARRANGES:
            found[eqn.outvars[0]] = _array(eqn.invars[0], found)
        elif is_call(eqn):
            found.update(_returned(eqn, found, memo))
    memo[key] = found
    return found


def _array(v: Atom, moved: Mapping[Any, Atom]) -> Atom:
    return v if isinstance(v, Literal) else moved.get(v, v)


def _returned(eqn: JaxprEqn, moved: Mapping[Any, Atom], memo: Memo) -> dict[Any, Atom]:
    """Returns the arrays that the results of a call hold: of its operands, or of one another."""
    body = body_of(called(eqn))
    inner = moved_in(body, [NONE] * len(body.invars), memo)
    outer = dict(zip(body.invars, [_array(v, moved) for v in eqn.invars], strict=True))
    pairs = [(v, _array(w, inner)) for v, w in zip(eqn.outvars, body.outvars, strict=True)]
    return {v: outer.setdefault(w, v) for v, w in pairs if not isinstance(w, Literal)}


def given_to(eqn: JaxprEqn, marks: AllMarks, moved: Mapping[Any, Atom]) -> list[Marks]:
    """Returns the marks of the operands of a call or a loop, and which of them alias one array.

    In a `jit` of ``a @ b.T`` only these marks show that both are one array: distances of a Gram
    matrix were 20 % off in bfloat16, and 0.6 % when written inline.

    Args:
        eqn: The call or the loop.
        marks: The result of `marks_of`.
        moved: The result of `moved_in`.
    """
    # Rows of an array are no rows of its transpose.
    arrays = [_array(v, moved) if is_call(eqn) else v for v in eqn.invars]
    places: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        if not isinstance(array, Literal):
            places.setdefault(array, []).append(i)
    found = of(marks, eqn.invars)
    for several in places.values():
        for i in several if len(several) > 1 else ():
            found[i] = found[i]._replace(same=several[0] + 1)
    return found


def full_size(eqn: JaxprEqn, made: Sequence[Marks]) -> list[int]:
    """Returns the positions of operands with the result's shape that are not broadcasts.

    Args:
        eqn: The equation.
        made: The marks of its operands.
    """
    shape = _shape(eqn.outvars[0])
    return [
        i
        for i, (v, m) in enumerate(zip(eqn.invars, made, strict=True))
        if not isinstance(v, Literal) and not m.spread and _shape(v) == shape
    ]


def _shape(v: Atom) -> Any:
    return getattr(aval_of(v), "shape", None)  # a token has none


def adds(eqn: JaxprEqn, made: Sequence[Marks]) -> list[int]:
    """Returns the operands of a sum that belongs to chains, [] for any other equation."""
    if eqn.primitive.name not in _SUMS:
        return []
    # A given value votes by itself; with a bias of one example as the other operand there is no
    # chain.
    summands = [i for i in full_size(eqn, made) if not made[i].given]
    return summands if len(summands) == 2 and not is_convolved([made[i] for i in summands]) else []


def is_convolved(summands: Sequence[Marks]) -> bool:
    """Returns whether all summands come from convolutions, and none was scaled last."""
    return bool(summands) and all(m.convolved and not m.scaled for m in summands)


def is_convolved_sum(eqn: JaxprEqn, made: Sequence[Marks]) -> bool:
    """Returns whether an equation is a sum in the stream of a convolutional network."""
    if eqn.primitive.name not in _SUMS:
        return False
    summands = full_size(eqn, made)
    return len(summands) == 2 and is_convolved([made[i] for i in summands])


def accumulates(eqn: JaxprEqn, made: Sequence[Marks], is_added: bool) -> bool:
    """Returns whether an equation computes an accumulator.

    Args:
        eqn: The equation.
        made: The marks of its operands.
        is_added: Its result is a summand of another sum.
    """
    summands = adds(eqn, made)
    return bool(summands) and (is_added or any([made[i].summed for i in summands]))


def _factors(eqn: JaxprEqn, made: Sequence[Marks]) -> int:
    if eqn.invars[0] is eqn.invars[1]:  # a square, as in a norm, is no chain
        return 0
    found = full_size(eqn, made)
    return 1 + max([made[i].factors for i in found]) if len(found) == 2 else 0


def _of_contraction(eqn: JaxprEqn, made: Sequence[Marks], moved: Mapping[Any, Atom]) -> Marks:
    a, b = [_array(v, moved) for v in eqn.invars[:2]]
    is_sum_of_squares = is_norm(eqn)
    is_gram = not is_sum_of_squares and a is b
    return Marks(
        convolved=eqn.primitive.name == "conv_general_dilated",
        fresh=2,
        squares=2 if is_sum_of_squares else 0,
        sums_powers=any([m.power or m.sums_powers for m in made[:2]]),
        gram=2 if is_gram else 0,
        bound=int(is_sum_of_squares),
        exponential=any([m.exponential for m in made[:2]]),
        angle=at_least(1, reduction_depth(eqn)) and _is_angle(eqn.invars[:2], made),
        whole=all([m.whole for m in made[:2]]),
        averaged=2 if any([m.fixed for m in made[:2]]) else 1,
    )


def _of_one_array(eqn: JaxprEqn, m: Marks) -> Marks | None:
    """Returns the marks of elements that are spread, added up, picked or moved; else None."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim" and not is_as_large(eqn.invars[0], eqn.outvars[0]):
        return m._replace(
            summed=False,
            factors=0,
            convolved=False,
            scaled=False,
            spread=m.spread or assumed_size(element_count(eqn.invars[0])),
            exponential=False,
        )
    if name in _ADDS_UP:
        found = Marks(squares=2) if m.power == 2 else ADDED_UP
        return found._replace(gram=min(1, m.gram), bound=m.bound, whole=m.whole)
    if name in _PICKS and m.spread and at_least(m.spread, element_count(eqn.outvars[0])):
        m = m._replace(spread=0)  # at most the elements before a broadcast
    if name in _PICKS and m.gram:
        return m._replace(gram=1)
    if name == "convert_element_type":
        kind = aval_of(eqn.invars[0]).dtype
        if jnp.issubdtype(kind, jnp.bool_):
            return BITS
        if jnp.issubdtype(kind, jnp.integer):
            return m._replace(angle=True, whole=True)
    return m if name in _REARRANGES else None


def _sign(literal: Literal) -> int:
    # A complex number has no sign.
    return 0 if np.iscomplexobj(literal.val) else -1 if literal.val < 0 else 1


def _of_counting(eqn: JaxprEqn, made: Sequence[Marks]) -> Marks | None:
    """Returns the marks of positions, of a cumulative sum and of a test for NaN; else None."""
    name = eqn.primitive.name
    if name == "iota":
        return COUNTED if not at_least(3, iota_length(eqn)) else ANGLE
    if name == "cumsum":
        if made[0].spread or made[0].counted:
            return COUNTED
        return Marks(bound=made[0].bound, fallen=made[0].bound < 0, whole=made[0].whole)
    is_nan = name == "ne" and eqn.invars[0] is eqn.invars[1]
    return IS_NAN if is_nan else None


def _of_equal(eqn: JaxprEqn, made: Sequence[Marks], memo: Memo) -> Marks:
    """Returns the marks of results, once for equal equations on operands of equal marks."""
    operands = [_sign(v) if isinstance(v, Literal) else None for v in eqn.invars]
    is_same = len(eqn.invars) > 1 and eqn.invars[0] is eqn.invars[1]
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    key = (eqn.primitive, is_same, *operands, *avals, *made, *eqn.params.values())
    try:
        found = memo.get(key)
    except TypeError:  # a parameter without a hash
        return _of_result(eqn, made)
    if found is None:
        found = memo[key] = _of_result(eqn, made)
    return found


def _of_result(eqn: JaxprEqn, made: Sequence[Marks]) -> Marks:
    name = eqn.primitive.name
    if made and (found := _of_one_array(eqn, made[0])) is not None:
        return found
    if name in FOLDS and all([m.given == NUMBER.given for m in made]):
        return NUMBER
    if (found := _of_counting(eqn, made)) is not None:
        return found
    is_mul = name == "mul"
    power = _power(eqn, made)
    is_whole = _is_whole(eqn, made)
    saturates = name in _SATURATES
    is_marked = power or is_whole or saturates or name in BOUNDS or name in _LARGEST
    if not (is_marked or any([m not in _UNMARKED for m in made])):
        return NONE
    if len(eqn.outvars) != 1 or name in _DAMPS:
        return Marks(saturated=saturates)
    at = full_size(eqn, made)
    large = [made[i] for i in at]
    small = [i for i in range(len(made)) if i not in at]
    passes = name in _CHEAP
    factors = max([m.factors for m in made])
    if is_mul and len(large) == 2:
        factors = min(MOST_FACTORS, _factors(eqn, made))
    is_given = [m.given > 0 for m in made]
    scaled = _scaled_last(name, large, [is_given[i] for i in small])
    fresh = max([m.fresh for m in made]) if name in _KEEPS_FRESH else 0
    scales = name in ("mul", "div") and any(is_given)
    if scales:
        fresh = min(1, max([m.fresh for m in made]))
    kept, scaled_alone = _averages(name, made, scales)
    operands = Operands(eqn, _signs(eqn, made), made, at)
    return Marks(
        summed=bool(adds(eqn, made)) or (passes and any([m.summed for m in made])),
        factors=factors if passes else 0,
        convolved=bool(large) and all([m.convolved for m in large]),
        scaled=scaled,
        spread=max([m.spread for m in made]) if passes and all([m.spread for m in made]) else 0,
        fresh=fresh,
        power=power,
        squares=_squares(eqn, made, is_given),
        sums_powers=any([m.sums_powers for m in kept]),
        crosses=any([m.crosses for m in scaled_alone]) or _crosses(name, power, made),
        added_up=scales and any([m.added_up for m in made]),
        of_sums=(is_mul and all([m.added_up for m in made]))
        or (scales and any([m.of_sums for m in made])),
        counted=name in _KEEPS_COUNT and _is_counted(eqn, made),
        gram=_gram(eqn, made, at, is_given),
        bound=BOUNDS[name](operands) if name in BOUNDS else 0,
        exponential=is_exponential(operands),
        largest=_is_largest(name, made),
        angle=name in _OF_ELEMENTS and _is_angle(eqn.invars, made),
        whole=is_whole,
        saturated=saturates,
        averaged=max([m.averaged for m in kept], default=0),
    )


def _scaled_last(name: str, large: Sequence[Marks], small_is_given: Sequence[bool]) -> bool:
    if small_is_given and name in ("mul", "div"):
        return any(small_is_given)
    is_shifted = small_is_given and name in ("add", "sub")
    return not is_shifted and any([m.scaled for m in large])


def _signs(eqn: JaxprEqn, made: Sequence[Marks]) -> list[int]:
    pairs = zip(eqn.invars, made, strict=True)
    return [_sign(v) if isinstance(v, Literal) else m.bound for v, m in pairs]


def _averages(
    name: str, made: Sequence[Marks], scales: bool
) -> tuple[Sequence[Marks], Sequence[Marks]]:
    """Returns the marks of joined or scaled operands, and of scaled operands alone."""
    # A sum divided by a computed divisor, such as a count or a degree, is an average, too.
    scaled = made[:1] if name == "div" else made if scales else []
    return (made if name in _JOINS else scaled), scaled


def _crosses(name: str, power: int, made: Sequence[Marks]) -> bool:
    return name not in _JOINS and bool(power) and all([m.fresh or m.averaged for m in made])


def _is_largest(name: str, made: Sequence[Marks]) -> bool:
    if name == "log":
        return made[0].added_up
    if name == "select_n":  # `where(isfinite(m), m, 0)`
        cases = made[1:]
        of_each = [m.largest or m.given == NUMBER.given for m in cases]
        return all(of_each) and any([m.largest for m in cases])
    return name in _LARGEST or (name in ("max", "add") and any([m.largest for m in made]))


def _gram(eqn: JaxprEqn, made: Sequence[Marks], at: Sequence[int], is_given: Sequence[bool]) -> int:
    name = eqn.primitive.name
    if name in ("mul", "div"):
        return max([m.gram for m in made]) if any(is_given) else 0
    if name == "select_n":  # `where(eye, gram, 0)`, not the matrix of a diagonal
        return max([made[i].gram for i in at], default=0)
    is_sum = name in _SUMS or name == "neg"
    grams = [m.gram for m, given in zip(made, is_given, strict=True) if not given]
    return min(grams) if is_sum and grams else 0


def _is_counted(eqn: JaxprEqn, made: Sequence[Marks]) -> bool:
    """Whether positions are joined, or shifted and scaled by numbers; times data they are data."""
    pairs = list(zip(eqn.invars, made, strict=True))[eqn.primitive.name == "select_n" :]
    others = [v for v, m in pairs if not m.counted]
    are_numbers = all([isinstance(v, Literal) or at_least(1, element_count(v)) for v in others])
    return len(others) < len(pairs) and are_numbers


def _is_angle(operands: Sequence[Atom], made: Sequence[Marks]) -> bool:
    """Whether floats are a function of integers and given values alone."""
    pairs = zip(operands, made, strict=False)
    floats = [m for v, m in pairs if jnp.issubdtype(aval_of(v).dtype, jnp.floating)]
    return any([m.angle for m in floats]) and all([m.angle or m.given > 0 for m in floats])


def _is_whole(eqn: JaxprEqn, made: Sequence[Marks]) -> bool:
    if eqn.primitive.name not in _KEEPS_WHOLE:
        return eqn.primitive.name in _SNAPS
    pairs = zip(eqn.invars, made, strict=True)
    floats = [m for v, m in pairs if jnp.issubdtype(aval_of(v).dtype, jnp.floating)]
    return bool(floats) and all([m.whole for m in floats])


def _power(eqn: JaxprEqn, made: Sequence[Marks]) -> int:
    name = eqn.primitive.name
    if name in _JOINS:
        return max([m.power for m in made])
    if name == "square" or exponent(eqn) == 2 or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
        return 2
    return int(name == "mul" and len(full_size(eqn, made)) == 2)


def _squares(eqn: JaxprEqn, made: Sequence[Marks], is_given: Sequence[bool]) -> int:
    name = eqn.primitive.name
    squares = max([m.squares for m in made])
    if name == "sqrt":
        return squares // 2
    if squares == 1:
        return 2 if _power(eqn, made) == 2 else 0
    if name == "mul":  # not `y * std`: a deviation may scale other values than distances
        return squares if any(is_given) else 0
    if name == "div":
        return made[0].squares
    return squares if name in _CHEAP else 0


def _of_structure(eqn: JaxprEqn, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    found: list[list[Marks]] = [[] for _ in eqn.outvars]
    for body in bodies(eqn):
        jaxpr = body_of(body.jaxpr)
        inner = marks_of(jaxpr, inputs_of(body, given, memo), memo)
        accumulated = accumulated_in(body, memo)
        for k, (r, m) in enumerate(zip(body.results, of(inner, jaxpr.outvars), strict=True)):
            if r is not None:
                found[r].append(m._replace(summed=True) if k in accumulated else m)
    return [Marks.union(several) if several else NONE for several in found]


def inputs_of(body: Body, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of the inputs of a body.

    A carry has those of its initial value and those that an iteration gives it.

    Args:
        body: The body.
        given: The marks of the operands of its equation.
        memo: As for `marks_of`.
    """
    inputs = [given[i] for i in body.operands]
    # The body determines the marks of a carry in the condition.
    for i in body.carried:
        inputs[i] = inputs[i]._replace(summed=False, same=0) if body.carries else NONE
    if not body.carries:
        return inputs
    accumulated = accumulated_in(body, memo)
    for i, k in body.carries:
        inputs[i] = inputs[i]._replace(summed=k in accumulated)
    found = _gone_round(body, inputs, memo)
    return _gone_round(body, _with_sums(body, found, memo), memo)


def _gone_round(body: Body, inputs: list[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of a loop's inputs, with those of the carries after an iteration."""
    jaxpr = body_of(body.jaxpr)
    while True:
        before, made = list(inputs), of(marks_of(jaxpr, inputs, memo), jaxpr.outvars)
        for i, k in body.carries:
            inputs[i] = Marks.union([inputs[i], made[k]])._replace(summed=inputs[i].summed)
        if inputs == before:  # it ends: `union` moves each mark in one direction only
            return inputs


def _with_sums(body: Body, inputs: list[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of a loop's inputs; carries that accumulate `exp` are exponential."""
    jaxpr = body_of(body.jaxpr)

    def marked(at: Collection[int]) -> list[Marks]:
        return [m._replace(exponential=True) if i in at else m for i, m in enumerate(inputs)]

    def returned(at: Collection[int]) -> frozenset[int]:
        made = of(marks_of(jaxpr, marked(at), memo), jaxpr.outvars)
        return frozenset(i for i, k in body.carries if made[k].exponential)

    made = marks_of(jaxpr, inputs, memo)
    shapes = {aval_of(v).shape for v, m in made.items() if m.exponential}
    # A carry that is a sum of exponentials stays one if each iteration adds an exponential.
    sums = frozenset(
        i for i, _ in body.carries if inputs[i].summed and aval_of(jaxpr.invars[i]).shape in shapes
    )
    while sums and (fewer := returned(sums) & sums) != sums:
        sums = fewer
    return marked(sums)


def accumulated_in(body: Body, memo: Memo) -> frozenset[int]:
    """Returns the outputs of a body that are carries of its loop which accumulate.

    Args:
        body: The body of a loop, or of anything else, which has no carries.
        memo: As for `marks_of`.
    """
    if not body.carries:
        return frozenset()
    jaxpr = body_of(body.jaxpr)
    if (key := ("accumulated", id(jaxpr), body.fixed)) not in memo:
        memo[key] = accumulating_carries(jaxpr, body.fixed, len(body.carries))
    return memo[key]
