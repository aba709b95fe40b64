"""What the program says of a value, whatever dtypes it gets: one sweep, first to last.

Marks are facts about how a value is made. Like the needs of its readers (`needs`) they do not
depend on dtypes, so that they are known before anything is decided, and they enter and leave a
call, a checkpoint or a branch as if its body stood there.

**Chains.** A value that is added to again and again is an accumulator: the residual stream of a
transformer, the state of an integrator, a sum over experts. In 16 bits each sum rounds the whole
value, however small the branch is: of 24 branches of 1e-3 a stream in bfloat16 lost 83 %
(`python -m tests.scenarios.chains`). So the planner computes accumulators in float32, in loops and
written out, whatever they begin with and whatever scales the branches. One sum (a bias, ``q + k``)
is no chain. Nor is the stream of a convolutional network, where both summands come from
convolutions and none was scaled last: its traffic is its speed, and a batch norm gives each branch
the size of the stream (PyTorch and ``dtype=`` by hand keep it in 16 bits, too).

A product of many factors is a chain as well, from the third product on: two roundings cost 2**-8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..compat import Literal, body_of
from ..primitives.structure import STRUCTURES, Body, bodies
from ..primitives.traits import having
from .returning_carries import accumulating_carries
from .symbolic_sizes import at_least, element_count

_SUMS = having("sums") | {"sub"}
_CHEAP = having("feeds") | having("rounds")
_MOVES = having("moves")
_CONVOLVES = "conv_general_dilated"
MOST_FACTORS = 2


class Marks(NamedTuple):
    """How a value is made.

    Args:
        summed: A sum of values of one size made it, since then only cheap operations.
        factors: So many products of values of its size made it, counted up to two.
        multiplied: A product made it, and nothing since.
        convolved: A convolution made it, since then only operations element by element.
        scaled: The last of those was a factor that is given: it may be small beside others.
        spread: Smaller values are repeated in it: a bias.
        given: An input or a constant of the program, or elements of one.
    """

    summed: bool = False
    factors: int = 0
    multiplied: bool = False
    convolved: bool = False
    scaled: bool = False
    spread: bool = False
    given: bool = False

    @classmethod
    def union(cls, several: Sequence[Marks]) -> Marks:
        """Returns what holds of one of several branches; of a convolution, what holds of all."""
        return cls(
            any([m.summed for m in several]),
            max([m.factors for m in several]),
            any([m.multiplied for m in several]),
            all([m.convolved for m in several]),
            any([m.scaled for m in several]),
            all([m.spread for m in several]),
            all([m.given for m in several]),
        )


NONE = Marks()
SUMMED = Marks(summed=True)
GIVEN = Marks(given=True)

Memo: TypeAlias = dict[Any, Any]
AllMarks: TypeAlias = Mapping[Any, Marks]


def marks_of(jaxpr: Any, inputs: Sequence[Marks], memo: Memo) -> AllMarks:
    """Returns the marks of each variable that has any.

    Args:
        jaxpr: An open jaxpr.
        inputs: The marks of its inputs.
        memo: What is known already; who owns it keeps the jaxprs alive.
    """
    key = "marks", id(jaxpr), tuple(inputs)
    if key in memo:
        return memo[key]
    marks = {v: m for v, m in zip(jaxpr.invars, inputs, strict=True) if m != NONE}
    marks.update(dict.fromkeys(jaxpr.constvars, GIVEN))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in STRUCTURES:
            found = _of_structure(eqn, marks, memo)
        else:
            found = [_of_result(eqn, marks)] * len(eqn.outvars)
        marks.update((v, m) for v, m in zip(eqn.outvars, found, strict=True) if m != NONE)
    memo[key] = marks
    return marks


def of(marks: AllMarks, atoms: Sequence[Any]) -> list[Marks]:
    """Returns the marks of variables and literals."""
    return [NONE if isinstance(v, Literal) else marks.get(v, NONE) for v in atoms]


def full_size(eqn: Any, marks: AllMarks) -> list[Any]:
    """Returns the operands that are as large as the result, and no smaller values repeated."""
    shape = eqn.outvars[0].aval.shape
    return [
        v
        for v in eqn.invars
        if not isinstance(v, Literal) and v.aval.shape == shape and not marks.get(v, NONE).spread
    ]


def adds(eqn: Any, marks: AllMarks) -> list[Any]:
    """Returns the operands of a sum that belongs to chains, [] for any other equation."""
    if eqn.primitive.name not in _SUMS:
        return []
    # What is given votes by itself; beside a bias of one example there is no second sum.
    summands = [v for v in full_size(eqn, marks) if not marks.get(v, NONE).given]
    return summands if len(summands) == 2 and not is_convolved(of(marks, summands)) else []


def is_convolved(summands: Sequence[Marks]) -> bool:
    """Returns whether all summands come from convolutions, and none was scaled last."""
    return bool(summands) and all(m.convolved and not m.scaled for m in summands)


def is_convolved_sum(eqn: Any, marks: AllMarks) -> bool:
    """Returns whether an equation is a sum in the stream of a convolutional network."""
    if eqn.primitive.name not in _SUMS:
        return False
    summands = full_size(eqn, marks)
    return len(summands) == 2 and is_convolved(of(marks, summands))


def accumulates(eqn: Any, marks: AllMarks, is_added: bool) -> bool:
    """Returns whether an equation computes an accumulator.

    Args:
        eqn: The equation.
        marks: The marks of the variables of its jaxpr.
        is_added: Its result is a summand of another sum.
    """
    if eqn.primitive.name == "mul":
        return _factors(eqn, marks) > MOST_FACTORS
    summands = adds(eqn, marks)
    return bool(summands) and (is_added or any([m.summed for m in of(marks, summands)]))


def _factors(eqn: Any, marks: AllMarks) -> int:
    if eqn.invars[0] is eqn.invars[1]:  # a square, as in a norm, is no chain
        return 0
    found = of(marks, full_size(eqn, marks))
    return 1 + max([m.factors for m in found]) if len(found) == 2 else 0


def _of_result(eqn: Any, marks: AllMarks) -> Marks:
    name = eqn.primitive.name
    if name == _CONVOLVES:
        return Marks(convolved=True)
    given = of(marks, eqn.invars)
    if name == "broadcast_in_dim" and not at_least(
        element_count(eqn.invars[0]), element_count(eqn.outvars[0])
    ):
        return Marks(spread=True, given=given[0].given)
    if name in _MOVES or name == "convert_element_type":
        return given[0]
    is_mul = name == "mul"
    if not (is_mul or name in _SUMS or any([m is not NONE for m in given])):
        return NONE
    if len(eqn.outvars) != 1 or name in _OPAQUE:
        return NONE
    large_ones = full_size(eqn, marks)
    large = of(marks, large_ones)
    small = [v for v in eqn.invars if not any([v is w for w in large_ones])]
    passes = name in _CHEAP
    factors = max([m.factors for m in given])
    if is_mul and len(large) == 2:
        factors = min(MOST_FACTORS, _factors(eqn, marks))
    scaled = any([m.scaled for m in large])
    if small and name in ("mul", "div"):
        scaled = any([isinstance(v, Literal) or marks.get(v, NONE).given for v in small])
    elif small and name in ("add", "sub"):
        scaled = False
    return Marks(
        summed=bool(adds(eqn, marks)) or (passes and any([m.summed for m in given])),
        factors=factors if passes else 0,
        multiplied=is_mul,
        convolved=bool(large) and all([m.convolved for m in large]),
        scaled=scaled,
        spread=passes and bool(given) and all([m.spread for m in given]),
    )


# Their results are no longer made element by element.
_OPAQUE = having("contracts") | having("damps")


def _of_structure(eqn: Any, marks: AllMarks, memo: Memo) -> list[Marks]:
    given = of(marks, eqn.invars)
    found: list[list[Marks]] = [[] for _ in eqn.outvars]
    for body in bodies(eqn):
        jaxpr = body_of(body.jaxpr)
        inner = marks_of(jaxpr, inputs_of(body, given, memo), memo)
        accumulated = accumulated_in(body, memo)
        for k, (r, m) in enumerate(zip(body.results, of(inner, jaxpr.outvars), strict=True)):
            if r is not None:
                found[r].append(SUMMED if k in accumulated else m)
    return [Marks.union(several) if several else NONE for several in found]


def inputs_of(body: Body, given: Sequence[Marks], memo: Memo) -> list[Marks]:
    """Returns the marks of the inputs of a body.

    Args:
        body: The body.
        given: The marks of the operands of its equation.
        memo: As for `marks_of`.
    """
    inputs = [given[i] for i in body.operands]
    accumulated = accumulated_in(body, memo)
    for i, k in body.carries:
        # What else a carry is made of differs between the first iteration and the others.
        inputs[i] = SUMMED if k in accumulated else NONE
    return inputs


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
