"""Which equations of a planned program are risky in the 16 bits that the program declares.

The program is planned as it is. What a policy computes in float32, and the program in 16 bits, is a
risk; so is what the planner knows of values: loops that add up, positions, numbers out of range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...interpreters.after.walk import Origin, Visit, behind
from ...interpreters.compat import Literal, body_of, jax_function, name_stack, source_line
from ...interpreters.plan.data import Source, ValueState
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.plan.reasons import ReasonCode
from ...interpreters.plan.returning_carries import accumulating_carries, residual_streams
from ...interpreters.primitives.reading import cast_dtype, summands
from ...interpreters.primitives.structure import bodies, called, is_call
from ...interpreters.primitives.traits import RISKS, having
from ...policies import FLOAT32
from ...scopes import read_mark
from .kinds import largest_integer

_ARITHMETIC = having("affine") & having("feeds")
_MOVES = having("moves")
_CASTS = frozenset(("convert_element_type",))
_SHIFTS = having("shifts")

# Of so few terms a sum loses no more than the same number of operations in a row, 4 u typically.
_FEW = 16

# Activations with an exponential inside, whose condition number is at most 1: they err by what each
# of their operations does, as a tanh.
_WELL_CONDITIONED = frozenset("celu elu mish selu softplus".split())


class Risk(NamedTuple):
    """One equation that is risky.

    Args:
        kind: The name of its kind.
        visit: The equation.
        n: How many terms it adds up, steps it runs, or positions there are; None if unknown.
        source: The user's source line; that of the call around it where it has none.
    """

    kind: str
    visit: Visit
    n: float | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A planned program that is looked at.

    Args:
        visits: Its equations, with the paths of the inputs as origins.
        outputs: Where each output comes from.
        results: The outputs themselves, as variables.
        sources: What is known of each input, by its path.
        dtype: The 16-bit dtype that is looked for.
    """

    visits: Sequence[Visit]
    outputs: Sequence[Origin]
    results: Sequence[Any]
    sources: dict[Any, ValueState]
    dtype: np.dtype

    def is_low(self, atom: Any) -> bool:
        """Whether a variable or literal is declared in the dtype."""
        return float_dtype(atom.aval, FLOAT32) == self.dtype

    def is_parameter(self, origin: Origin) -> bool:
        """Whether a value is an input that holds parameters, cast or moved."""
        path = behind(self.visits, origin, _CASTS | _MOVES)
        return isinstance(path, str) and self.sources[path].source is Source.PARAM


def risks_of(program: Program) -> Iterator[Risk]:
    """Yields the risks of a program, equation by equation, and those of its outputs at the end.

    Args:
        program: The planned program.
    """
    lines: list[str] = []
    harmless = -1  # the last equation of an activation
    for visit in program.visits:
        # What JAX's own functions hold, as `jnp.where`, has no line of the user's.
        del lines[visit.depth :]
        lines.append(source_line(visit.eqn) or (lines[-1] if lines else ""))
        if any(read_mark(name) is not None for name in visit.scope):
            continue  # a region with a precision that somebody chose
        if is_call(visit.eqn) and jax_function(called(visit.eqn)) in _WELL_CONDITIONED:
            harmless = max(harmless, visit.index + visit.inner)
        if visit.index > harmless:
            for rule in _RULES:
                yield from (risk._replace(source=lines[-1]) for risk in rule(program, visit))
    for risk in _of_outputs(program):
        yield risk._replace(source=source_line(risk.visit.eqn))


# --- what the policy would compute in float32 ----------------------------------------------------


def _of_policy(program: Program, visit: Visit) -> Iterator[Risk]:
    """Yields what is read in 16 bits, and in float32 by `autocast`, because of what it is."""
    eqn, reason = visit.eqn, visit.plan.reason.code
    kind = RISKS.get(eqn.primitive.name, "function")
    # A square is cheap: it is float32 for a reader, and only float16 has a range that it leaves.
    is_square = reason is ReasonCode.FEEDER and kind == "square" and program.dtype == np.float16
    if not is_square and (reason is not ReasonCode.FP32 or kind == "square"):
        return
    pairs = zip(eqn.invars, visit.plan.reads, strict=True)
    if not any(program.is_low(v) and dtype == FLOAT32 for v, dtype in pairs):
        return
    if kind in ("angle", "slope"):
        return  # an angle of positions alone: `_of_angle`
    if kind in ("sum", "product"):
        n = summands(eqn)
        if n <= _FEW:
            return
        is_backward = kind == "sum" and "transpose(" in name_stack(eqn)
        yield Risk("gradient sum" if is_backward else kind, visit, n)
    elif kind != "function" or eqn.primitive.name not in _ARITHMETIC:
        yield Risk(kind, visit)  # a reciprocal errs by what each quotient does


# --- what is known of values ---------------------------------------------------------------------


def _of_angle(program: Program, visit: Visit) -> Iterator[Risk]:
    """Yields sines and cosines of 16-bit angles that are made from integers."""
    if RISKS.get(visit.eqn.primitive.name) != "angle" or not program.is_low(visit.eqn.invars[0]):
        return
    if (bound := _largest_position(program, visit.origins[0])) is not None:
        yield Risk("angle", visit, bound)


def _largest_position(program: Program, origin: Origin) -> float | None:
    """Returns the largest integer that a value is made from by arithmetic, None if from none."""
    pending, seen, found = [origin], set(), []
    while pending:
        origin = pending.pop()
        if not isinstance(origin, int) or origin in seen:
            continue
        seen.add(origin)
        visit = program.visits[origin]
        if (bound := _counted(visit)) is not None:
            found.append(bound)
        elif visit.eqn.primitive.name in having("affine") | having("contracts"):
            pending += visit.origins
        elif visit.inner:
            pending += [x for origins in visit.returned for x in origins]
    return max(found, default=None)


def _counted(visit: Visit) -> float | None:
    """Returns the bound of the integers that an equation turns into floats, None for others."""
    (result, *_), (state, *_) = visit.eqn.outvars, visit.plan.results
    if float_dtype(result.aval, FLOAT32) is None:
        return None
    if not visit.eqn.invars:
        return state.integer_bound  # an iota
    declared = getattr(visit.eqn.invars[0].aval, "dtype", None)
    counts = isinstance(declared, np.dtype) and declared.kind in "iu" and declared.itemsize > 1
    return state.integer_bound if counts and cast_dtype(visit.eqn) is not None else None


def _of_position(program: Program, visit: Visit) -> Iterator[Risk]:
    """Yields where more positions are counted than 16 bits tell apart."""
    if len(visit.eqn.outvars) == 1 and program.is_low(visit.eqn.outvars[0]):
        bound = _counted(visit)
        if bound is not None and largest_integer(program.dtype) < bound < math.inf:
            yield Risk("position", visit, bound)


def _of_numbers(program: Program, visit: Visit) -> Iterator[Risk]:
    """Yields where a number of the program is infinite, or 0, in 16 bits."""
    eqn, name = visit.eqn, visit.eqn.primitive.name
    if cast_dtype(eqn) == program.dtype:
        known = visit.plan.given[0].known_value
        if known is not None and math.isfinite(known) and not _is_finite(known, program.dtype):
            yield Risk("mask", visit)
    elif name in _ARITHMETIC:
        # JAX has rounded a Python number already. An infinity is chosen, not computed with.
        numbers = [float(v.val) if _is_number(program, v) else None for v in eqn.invars]
        if any(x is not None and math.isinf(x) for x in numbers):
            yield Risk("mask", visit)
        # `0 + x` begins a Python sum; nobody writes `x + 0`.
        if program.dtype == np.float16 and name in _SHIFTS and numbers[1] == 0:
            yield Risk("epsilon", visit)


def _is_number(program: Program, atom: Any) -> bool:
    return isinstance(atom, Literal) and program.is_low(atom) and np.ndim(atom.val) == 0


def _is_finite(number: float, dtype: np.dtype) -> bool:
    with np.errstate(over="ignore"):
        return math.isfinite(float(np.float32(number).astype(dtype)))


def _of_routing(program: Program, visit: Visit) -> Iterator[Risk]:
    """Yields what picks among 16-bit numbers."""
    if RISKS.get(visit.eqn.primitive.name) == "routing" and program.is_low(visit.eqn.invars[0]):
        yield Risk("routing", visit)


# --- what adds up --------------------------------------------------------------------------------


def _of_carries(program: Program, visit: Visit) -> Iterator[Risk]:
    """Yields loops with a 16-bit carry that adds up; not a stream of residuals over layers."""
    for body in bodies(visit.eqn):
        jaxpr, first, count = body_of(body.jaxpr), body.fixed, len(body.carries)
        if not any(program.is_low(jaxpr.invars[i]) for i, _ in body.carries):
            continue
        # The weights of layers are parameters, or slices; a solver's matrix is neither.
        parameters = frozenset(
            i
            for i, k in enumerate(body.operands)
            if i >= first + count or program.is_parameter(visit.origins[k])
        )
        found = accumulating_carries(jaxpr, first, count)
        found -= residual_streams(jaxpr, first, count, parameters)
        if any(program.is_low(jaxpr.invars[first + k]) for k in found):
            # Nobody knows how often a `while` runs.
            steps = None if len(bodies(visit.eqn)) > 1 else body.repeats
            if steps is None or steps > _FEW:
                yield Risk("accumulator", visit, steps)


def _of_outputs(program: Program) -> Iterator[Risk]:
    """Yields outputs that update a parameter, and a loss, in 16 bits."""
    for i, (origin, result) in enumerate(zip(program.outputs, program.results, strict=True)):
        if not program.is_low(result) or not isinstance(origin, int):
            continue
        made = behind(program.visits, origin, _CASTS)
        if i == 0 and result.aval.shape == ():
            yield Risk("loss", program.visits[origin])
        elif isinstance(made, int) and _updates(program, program.visits[made], result):
            yield Risk("update", program.visits[made])


def _updates(program: Program, visit: Visit, result: Any) -> bool:
    """Whether an equation adds to a parameter of the shape of the result, or to a share of it."""
    if visit.eqn.primitive.name not in _SHIFTS:
        return False
    pairs = zip(visit.eqn.invars, visit.origins, strict=True)
    return any(
        v.aval.shape == result.aval.shape and program.is_parameter(_scaled(program, origin))
        for v, origin in pairs
    )


def _scaled(program: Program, origin: Origin) -> Origin:
    """Returns where a value comes from, before it is scaled by a number, as an average is."""
    made = behind(program.visits, origin, _CASTS)
    if not isinstance(made, int):
        return made
    visit = program.visits[made]
    others = [
        x
        for x, state in zip(visit.origins, visit.plan.given, strict=True)
        if state.known_value is None
    ]
    is_scaling = visit.eqn.primitive.name in _ARITHMETIC - _SHIFTS and len(others) == 1
    return others[0] if is_scaling else made


_RULES: tuple[Callable[[Program, Visit], Iterator[Risk]], ...] = (
    _of_policy,
    _of_angle,
    _of_position,
    _of_numbers,
    _of_routing,
    _of_carries,
)
