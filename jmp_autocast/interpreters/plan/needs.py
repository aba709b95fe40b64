"""Needs: backward facts about the consumers of a value, in one sweep from the last equation.

Needs do not depend on dtypes: they are known before the plan, and pass into and out of a call, a
checkpoint or a loop. Each row of `ROWS` has a need, the equations that have it, a function that
selects their operands, and the primitives through which the need passes to producers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...policies import DEFAULT_RULES, MOST_THAT_CANNOT_PAY, CastPolicy
from ..compat import JaxprEqn, Literal, Var
from ..primitives.reading import (
    casts_to_integer,
    is_norm,
    multiplies_points,
    reduction_depth,
)
from ..primitives.traits import TRAITS, having
from .avals import at_least
from .images import Images, cancelled, holds_one_array, is_quadratic, multiplies_complement
from .marks import MOST_FACTORS, PARAMETER, STENCIL, Marks, adds


class Need(enum.IntFlag):
    """The kinds of consumers of a value, as flags.

    Attributes:
        POLE: A function that is infinite at some value, near which it multiplies an error.
        STEEP: A square root, which is infinitely steep at 0.
        SHARP: A difference, a rank, a comparison of computed values, an angle, `cumprod`.
        SNAP: A cast to an integer, `floor`, `ceil` and `round`, or a comparison of whole numbers.
        LEADS: A matmul or a convolution, behind any number of elementwise operations and moves.
        ADDED: A sum of two values of the value's size; see `marks`.
        EXPANDED: A sum with squares, as of a distance or a variance that is multiplied out.
        DECOMPOSED: A decomposition of a matrix, or a solve, also behind products of several arrays.
        COMPUTED: Any equation but a move.
        BEYOND: Any equation but a move or a sum.
        LOW: An equation that may read it in 16 bits, also behind moves and choices of elements.
        FULL: An equation that may read it in float32, also behind these.
        ONCE: An equation that surely reads it in float32, also behind these.
        SHARED: Two such equations.
    """

    POLE = enum.auto()
    STEEP = enum.auto()
    SHARP = enum.auto()
    SNAP = enum.auto()
    ADDED = enum.auto()
    EXPANDED = enum.auto()
    DECOMPOSED = enum.auto()
    LEADS = enum.auto()
    COMPUTED = enum.auto()
    BEYOND = enum.auto()
    LOW = enum.auto()
    FULL = enum.auto()
    ONCE = enum.auto()
    SHARED = enum.auto()

    # The operators of `enum.Flag` are Python code: with them a fifth of the planning time went into
    # joining flags.
    __or__: Any = int.__or__
    __ror__: Any = int.__ror__
    __and__: Any = int.__and__
    __rand__: Any = int.__rand__
    __bool__: Any = int.__bool__
    __hash__: Any = int.__hash__


NOTHING = Need(0)
HARMED: Need = Need.POLE | Need.SHARP | Need.SNAP
EITHER: Need = Need.LOW | Need.FULL
OF_PRODUCTS: Need = Need.EXPANDED | Need.DECOMPOSED
"""The needs for which a guard of `equation` keeps contractions in float32."""

_CONTRACTS = having("contracts")
_ALL = frozenset(TRAITS) - _CONTRACTS
_CHEAP = having("feeds") | having("rounds")
_SUMS = having("sums")
_TURNS = having("turns")
_SNAPS = having("snaps")
_COMPARES = frozenset(("lt", "le", "gt", "ge"))
COMPARES_ANY = _COMPARES | {"eq", "ne", "is_finite"}
_RANKS = frozenset("top_k approx_top_k argmax argmin sort".split())
# Products, also those that an inner autocast has made, and attention kernels.
LOWERED = _CONTRACTS | {"accumulate", "float8_dot"}
LOWERED |= {name for name in _ALL if DEFAULT_RULES.get(name) is CastPolicy.LOWER_PRECISION_FP}
# A path to a product leads through these: cheap and promoting elementwise operations, and moves.
LEADS_ON = _CHEAP | having("moves") | {"convert_element_type", "div", "integer_pow"}
LEADS_ON |= {name for name in _ALL if DEFAULT_RULES.get(name) is CastPolicy.PROMOTE}
LEADS_ON -= _SNAPS | _RANKS | COMPARES_ANY
_POLE_AT_0, _POLE_AT_1 = having("log0"), having("div1")
_MULTIPLIES_ALL = frozenset(("cumprod", "reduce_prod"))


DECOMPOSES = frozenset(
    """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg lu qr schur svd triangular_solve
    tridiagonal tridiagonal_solve custom_linear_solve
    """.split()
)

_EXTREMES = frozenset("reduce_max reduce_min reduce_window_max reduce_window_min".split())


class NeedContext(NamedTuple):
    """An equation, and the facts for its rows.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        need: The needs of its results.
        producers: The equation that computes each variable.
        images: As for `mark_sweep.AllMarks`.
    """

    eqn: JaxprEqn
    marks: Sequence[Marks]
    need: Need
    producers: Mapping[Var, JaxprEqn]
    images: Images


def _poles(ctx: NeedContext) -> Sequence[Any]:
    return ctx.eqn.invars[1:] if ctx.eqn.primitive.name in _POLE_AT_1 else ctx.eqn.invars[:1]


def _is_kept_away(eqn: JaxprEqn) -> bool:
    """Whether a result is kept away from 0, as the sum in `sqrt(x * x + 1.0)` is."""
    is_sum = eqn.primitive.name in _SUMS | {"max"}
    return is_sum and any([isinstance(v, Literal) and np.all(v.val > 0) for v in eqn.invars])


def _factors(ctx: NeedContext) -> Sequence[Any]:
    if ctx.eqn.primitive.name != "mul":
        return ctx.eqn.invars[:1]
    # A factor of a long product needs its digits, and so does a factor of an accumulator.
    is_added = bool(ctx.need & Need.ADDED)
    pairs = zip(ctx.eqn.invars, ctx.marks[::-1], strict=True)
    return [v for v, m in pairs if m.factors >= MOST_FACTORS or (is_added and m.summed)]


def cannot_pay(eqn: JaxprEqn) -> bool:
    """Returns whether a contraction sums so few elements that no matrix unit gains by it."""
    most = MOST_THAT_CANNOT_PAY.get(eqn.primitive.name)
    return most is not None and at_least(most, reduction_depth(eqn))


def _expanded(ctx: NeedContext) -> Sequence[Any]:
    name = ctx.eqn.primitive.name
    if name in _CONTRACTS:
        # If products are rounded, `mean(x * x)` no longer matches `mean(x)`. The same holds for an
        # average of averages, along another axis, and for `(a @ p) @ a`. `(I - K H) @ P` is a
        # difference as well: `P - K (H @ P)`.
        if multiplies_complement(ctx.eqn, ctx.images):
            return [*ctx.eqn.invars[:2], *ctx.eqn.outvars]
        if not ctx.need & Need.EXPANDED:
            return ()
        if at_least(1, reduction_depth(ctx.eqn)) or is_quadratic(ctx.eqn, ctx.images):
            return ctx.eqn.invars[:2]  # an outer product, `(a @ p) @ a` or `(x @ q) @ q.T`
        pairs = zip(ctx.eqn.invars[:2], ctx.marks, strict=False)
        return [v for v, m in pairs if m.power or m.averaged == 2]
    # Sums with squares are `|x|^2 - 2 x.y`, and `E[xy] - E[x] E[y]` with means by convolutions, by
    # products or over a batch.
    meets_squares = any([m.squares == 2 for m in ctx.marks])
    if name == "sub":
        for a, b in (ctx.marks, ctx.marks[::-1]):
            meets_squares |= a.sums_powers and b.crosses > 0
            meets_squares |= a.fresh > 0 and b.crosses == 2
    # Squared distances use the diagonal of a Gram matrix: `d[:, None] + d - 2 * gram`.
    meets_squares |= len(ctx.marks) == 2 and {m.gram for m in ctx.marks} == {1, 2}
    if meets_squares:
        return ctx.eqn.invars
    return cancelled(ctx.eqn, ctx.marks, ctx.images) if name == "sub" else ()


def is_float32(eqn: JaxprEqn, marks: Sequence[Marks], need: Need) -> bool:
    """Whether a contraction runs in float32, as one of points with a constant matrix does."""
    warps = [m.fixed and multiplies_points(eqn, i) for i, m in enumerate(marks[:2])]
    return cannot_pay(eqn) or is_norm(eqn) or any(warps) or bool(need & OF_PRODUCTS)


def _decomposed(ctx: NeedContext) -> Sequence[Any]:
    if ctx.eqn.primitive.name in DECOMPOSES:
        return ctx.eqn.invars
    # In `h @ h.T` the operands may be rounded: the result is still a Gram matrix. In `h @ p @ h.T`
    # they need their digits: if `h @ p` is rounded, the result is no covariance.
    is_passed = ctx.need & Need.DECOMPOSED and not holds_one_array(ctx.eqn, ctx.images)
    return ctx.eqn.invars[:2] if is_passed else ()


def _snapped(ctx: NeedContext) -> Sequence[Any]:
    snaps = ctx.eqn.primitive.name in _SNAPS or casts_to_integer(ctx.eqn)
    compares_whole = len(ctx.marks) == 2 and all([m.whole for m in ctx.marks])
    return ctx.eqn.invars if snaps or compares_whole else ()


def _sharp(ctx: NeedContext) -> Sequence[Any]:
    name, marks = ctx.eqn.primitive.name, ctx.marks
    if name in _MULTIPLIES_ALL | {"mul"}:
        return _factors(ctx)
    if name in _CONTRACTS:
        # The contraction with a stencil is a small difference of large terms.
        is_sharp = any([m.fixed == STENCIL.fixed for m in marks])
    elif name == "sub":
        # A gate of `1 - sigmoid(7)` never opened: in bfloat16 the sigmoid is 1. The derivative of a
        # tanh also subtracts it from 1, but needs no digits there. A difference from a mean raises
        # no residual stream that is 16 bits by intent, and a subtracted bias raises nothing.
        first, second = ctx.eqn.invars
        producer = ctx.producers.get(second) if isinstance(second, Var) else None
        of_tanh = producer is not None and producer.primitive.name == "tanh"
        is_plain = any([m.wide or m.given == PARAMETER.given for m in marks])
        is_sharp = not (of_tanh and isinstance(first, Literal))
        is_sharp &= any([m.crowded for m in marks]) or not is_plain
    elif name in _EXTREMES:
        # Near 1, many results of a tanh are equal in 16 bits. The gradient of their maximum, which
        # belongs to the largest one, would go to others as well.
        is_sharp = marks[0].crowded == 2
    else:
        # A comparison with an input or a constant is a threshold, and one of a value with itself
        # finds NaNs: they rank nothing.
        finds_nans = all([v is ctx.eqn.invars[0] for v in ctx.eqn.invars])
        ranks_none = finds_nans or any([m.given for m in marks])
        is_sharp = name not in COMPARES_ANY or not ranks_none
    return ctx.eqn.invars if is_sharp else ()


class Row(NamedTuple):
    """A need, the equations that have it, and the primitives that pass it on.

    Args:
        need: The need.
        primitives: The primitives of the equations with the need.
        operands: Returns the operands of such an equation that get the need, or also its results.
        through: The primitives through which the need passes, from their results to their operands.
        why: The error without this row.
        consumer: The consumer, in words for reports.
        raises: The primitives that are raised to float32 if their result has the need.
        stops: Returns whether the need ends at an equation, although `through` names its primitive.
    """

    need: Need
    primitives: frozenset[str]
    operands: Callable[[NeedContext], Sequence[Any]]
    through: frozenset[str]
    why: str
    consumer: str = ""
    raises: frozenset[str] = _ALL
    stops: Callable[[JaxprEqn], bool] | None = None


ROWS = (
    Row(
        Need.POLE,
        _POLE_AT_0 | _POLE_AT_1,
        _poles,
        _CHEAP,
        # Near its pole, a function such as `log` multiplies an error of its operand by 1 / operand.
        "a sigmoid of 12 is 1 in bfloat16, and log(1 - 1) is infinite",
        "a function that is infinite at some value",
        having("saturates"),
    ),
    Row(
        Need.STEEP,
        frozenset(("sqrt", "cbrt")),
        lambda ctx: ctx.eqn.invars,
        _CHEAP - {"square", "integer_pow"},
        "in float16 the square of 1e-4 is 0, and the gradient of its root NaN",
        "a square root, which is infinitely steep at 0",
        frozenset(("mul", "square", "integer_pow")),
        stops=_is_kept_away,
    ),
    Row(
        Need.SHARP,
        _RANKS | COMPARES_ANY | _EXTREMES | _MULTIPLIES_ALL | _TURNS | _CONTRACTS | {"mul", "sub"},
        _sharp,
        _CHEAP | {"sqrt"},
        "sigmoids of 5.0 to 5.5 are one number in bfloat16: a router took 81 % of its choices, and "
        "behind 512 gates of 0.9975 a state was 2.3 times as large",
        "what ranks it, takes a difference of it or multiplies it up",
    ),
    Row(
        Need.SNAP,
        having("snaps") | _COMPARES | {"eq", "ne", "convert_element_type", "bitcast_convert_type"},
        _snapped,
        _CHEAP,
        "position 999 is 1,000 in bfloat16: 56 % of the indices of a grid were wrong",
        "what rounds it to an integer",
    ),
    Row(
        Need.LEADS,
        LOWERED,
        lambda ctx: () if is_float32(*ctx[:3]) else ctx.eqn.invars[:3],
        LEADS_ON,
        "`int(sigmoid * 255)` was another number for 2 to 25 % of the elements in bfloat16",
        raises=frozenset(),
    ),
    Row(
        Need.ADDED,
        _SUMS | {"sub"},
        lambda ctx: ctx.eqn.invars if adds(ctx.eqn, ctx.marks) else (),
        _CHEAP,
        "of 24 branches of 1e-3 a stream in bfloat16 lost 86 to 97 %",
        raises=frozenset(),
    ),
    Row(
        Need.EXPANDED,
        _SUMS | {"sub"} | _CONTRACTS,
        _expanded,
        _SUMS | having("rounds") | {"sub", "mul", "div", "square", "integer_pow"},
        "in bfloat16, 66 % of the nearest centroids were wrong, and an SSIM of 0.984 was 0.71",
        "what takes it from squares, of which it is nearly all",
    ),
    Row(
        Need.DECOMPOSED,
        DECOMPOSES | _CONTRACTS,
        _decomposed,
        _CHEAP | {"exp", "exp2", "sqrt", "pow"},
        "a Kalman filter was NaN where float32 is finite, a ridge regression 10 to 22 % off, and "
        "`h @ p @ h.T` is no covariance where `h @ p` was rounded",
        "a decomposition or a solve, which multiplies its error by the condition number",
    ),
)


REQUESTED: dict[str, list[Row]] = {}
THROUGH: dict[str, Need] = {}
STOPS = [(row.need, row.stops) for row in ROWS if row.stops is not None]
RAISED: dict[str, Need] = {}
"""The needs for which each primitive is raised to float32, by the primitive's name."""
for _row in ROWS:
    for _name in _row.primitives:
        REQUESTED.setdefault(_name, []).append(_row)
    for _name in _row.through:
        THROUGH[_name] = THROUGH.get(_name, NOTHING) | _row.need
    for _name in _row.raises:
        RAISED[_name] = RAISED.get(_name, NOTHING) | _row.need
