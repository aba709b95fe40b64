"""Which equations of a planned program are risky in the 16 bits that the program declares.

The program is planned as it is. What a policy computes in float32, and the program in 16 bits, is a
risk; so is what the planner knows of values: loops that add up, positions, numbers out of range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...autocast import PlannedCall
from ...interpreters.after.walk import Origin, Visit, behind, walk_with_outputs
from ...interpreters.compat import (
    Atom,
    Literal,
    aval_of,
    body_of,
    jax_function,
    name_stack,
    source_line,
)
from ...interpreters.plan.data import Source
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.plan.needs import ROWS
from ...interpreters.plan.reasons import READ_BY, ReasonCode
from ...interpreters.plan.returning_carries import accumulating_carries, residual_streams
from ...interpreters.primitives.reading import cast_dtype, summands
from ...interpreters.primitives.structure import bodies, called, is_call
from ...interpreters.primitives.traits import RISKS, having
from ...policies import FLOAT32
from ...scopes import read_mark
from .kinds import unit_roundoff

_ARITHMETIC = having("affine") & having("feeds")
_MOVES = having("moves")
_CASTS = frozenset(("convert_element_type",))
_SHIFTS = having("shifts")

# From the cause that the planner gives to what went wrong without the row of its table.
_NEEDED = {READ_BY + row.reader: row.why for row in ROWS if row.reader and row.harms_once}

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
        why: What went wrong in another program, of the row that says so; "" for none.
    """

    kind: str
    visit: Visit
    n: float | None = None
    source: str = ""
    why: str = ""


class Program:
    """A planned program that is looked at.

    Args:
        planned: The program.
        dtype: The 16-bit dtype that is looked for.
    """

    def __init__(self, planned: PlannedCall, dtype: np.dtype) -> None:
        paths, plan = planned.call.paths, planned.plan
        self._visits, self._outputs = walk_with_outputs(plan, paths)
        self._sources = {p: s.source for p, s in zip(paths, plan.inputs, strict=True)}
        self._results = body_of(planned.closed).outvars
        self._dtype = dtype

    def risks(self) -> Iterator[Risk]:
        """Yields the risks of the program, equation by equation, and those of its outputs."""
        lines: list[str] = []
        harmless = -1  # the last equation of an activation
        for visit in self._visits:
            # What JAX's own functions hold, as `jnp.where`, has no line of the user's.
            del lines[visit.depth :]
            lines.append(source_line(visit.eqn) or (lines[-1] if lines else ""))
            if any(read_mark(name) is not None for name in visit.scope):
                continue  # a region with a precision that somebody chose
            if is_call(visit.eqn) and jax_function(called(visit.eqn)) in _WELL_CONDITIONED:
                harmless = max(harmless, visit.index + visit.inner)
            if visit.index > harmless:
                for rule in (
                    self._of_policy,
                    self._of_needs,
                    self._of_values,
                    self._of_numbers,
                    self._of_carries,
                ):
                    yield from (risk._replace(source=lines[-1]) for risk in rule(visit))
        for risk in self._of_outputs():
            yield risk._replace(source=source_line(risk.visit.eqn))

    def _is_low(self, atom: Atom) -> bool:
        """Whether a variable or literal is declared in the dtype."""
        return float_dtype(atom.aval) == self._dtype

    def _is_parameter(self, origin: Origin) -> bool:
        """Whether a value is an input that holds parameters, cast or moved."""
        path = behind(self._visits, origin, _CASTS | _MOVES)
        return isinstance(path, str) and self._sources[path] is Source.PARAM

    # --- what the policy would compute in float32 ------------------------------------------------

    def _of_policy(self, visit: Visit) -> Iterator[Risk]:
        """Yields what is read in 16 bits, and in float32 by `autocast`, because of what it is."""
        eqn, reason = visit.eqn, visit.plan.reason.code
        kind = RISKS.get(eqn.primitive.name, "function")
        # A square is cheap: it is float32 for a reader, and only float16 has a range that it
        # leaves.
        expected = ReasonCode.FEEDER if kind == "square" else ReasonCode.FP32
        if reason is not expected or (kind == "square" and self._dtype != np.float16):
            return
        pairs = zip(eqn.invars, visit.plan.reads, strict=True)
        if not any(self._is_low(v) and dtype == FLOAT32 for v, dtype in pairs):
            return
        if kind in ("sum", "product"):
            if (n := summands(eqn)) > _FEW:
                is_backward = kind == "sum" and "transpose(" in name_stack(eqn)
                yield Risk("gradient sum" if is_backward else kind, visit, n)
        # A reciprocal errs by what each quotient does; of an angle positions decide: `_of_values`.
        elif kind not in ("angle", "slope") and (
            kind != "function" or eqn.primitive.name not in _ARITHMETIC
        ):
            yield Risk(kind, visit)

    def _of_needs(self, visit: Visit) -> Iterator[Risk]:
        """Yields what `autocast` would compute in float32 for a reader: the planner's own table."""
        cause, results = visit.plan.reason.cause, visit.eqn.outvars
        if len(results) == 1 and self._is_low(results[0]) and cause in _NEEDED:
            yield Risk("digits", visit, why=_NEEDED[cause])

    # --- what is known of values -----------------------------------------------------------------

    def _of_values(self, visit: Visit) -> Iterator[Risk]:
        """Yields 16-bit angles that are made from integers, too many positions, and picks."""
        eqn, kind = visit.eqn, RISKS.get(visit.eqn.primitive.name)
        if kind in ("angle", "routing") and self._is_low(eqn.invars[0]):
            bound = self._largest_position(visit.origins[0]) if kind == "angle" else None
            if kind == "routing" or bound is not None:
                yield Risk(kind, visit, bound)
        if len(eqn.outvars) == 1 and self._is_low(eqn.outvars[0]):
            bound, largest = _counted(visit), 1 / unit_roundoff(self._dtype)
            if bound is not None and largest < bound < math.inf:
                yield Risk("position", visit, bound)

    def _largest_position(self, origin: Origin) -> float | None:
        """Returns the largest integer that a value is made from by arithmetic, None for none."""
        pending, seen, found = [origin], set(), []
        while pending:
            origin = pending.pop()
            if not isinstance(origin, int) or origin in seen:
                continue
            seen.add(origin)
            visit = self._visits[origin]
            if (bound := _counted(visit)) is not None:
                found.append(bound)
            elif visit.eqn.primitive.name in having("affine") | having("contracts"):
                pending += visit.origins
            elif visit.inner:
                pending += [x for origins in visit.returned for x in origins]
        return max(found, default=None)

    def _of_numbers(self, visit: Visit) -> Iterator[Risk]:
        """Yields where a number of the program is infinite, or 0, in 16 bits."""
        eqn, name = visit.eqn, visit.eqn.primitive.name
        if cast_dtype(eqn) == self._dtype:
            known = visit.plan.given[0].known_value
            with np.errstate(over="ignore"):
                overflows = known is not None and np.isinf(np.float32(known).astype(self._dtype))
            if overflows and math.isfinite(known or 0):
                yield Risk("mask", visit)
        elif name in _ARITHMETIC:
            # JAX has rounded a Python number already. An infinity is chosen, not computed with.
            numbers = [
                float(v.val)
                if isinstance(v, Literal) and self._is_low(v) and not np.ndim(v.val)
                else 1.0
                for v in eqn.invars
            ]
            if any(map(math.isinf, numbers)):
                yield Risk("mask", visit)
            # `0 + x` begins a Python sum; nobody writes `x + 0`.
            if self._dtype == np.float16 and name in _SHIFTS and numbers[1] == 0:
                yield Risk("epsilon", visit)

    # --- what adds up ----------------------------------------------------------------------------

    def _of_carries(self, visit: Visit) -> Iterator[Risk]:
        """Yields loops with a 16-bit carry that adds up; not a stream of residuals over layers."""
        for body in bodies(visit.eqn):
            jaxpr, first, count = body_of(body.jaxpr), body.fixed, len(body.carries)
            if not any(self._is_low(jaxpr.invars[i]) for i, _ in body.carries):
                continue
            # The weights of layers are parameters, or slices; a solver's matrix is neither.
            parameters = frozenset(
                i
                for i, k in enumerate(body.operands)
                if i >= first + count or self._is_parameter(visit.origins[k])
            )
            found = accumulating_carries(jaxpr, first, count)
            found -= residual_streams(jaxpr, first, count, parameters)
            if any(self._is_low(jaxpr.invars[first + k]) for k in found):
                # Nobody knows how often a `while` runs.
                steps = None if len(bodies(visit.eqn)) > 1 else body.repeats
                if steps is None or steps > _FEW:
                    yield Risk("accumulator", visit, steps)

    def _of_outputs(self) -> Iterator[Risk]:
        """Yields outputs that update a parameter, and a loss, in 16 bits."""
        for i, (origin, result) in enumerate(zip(self._outputs, self._results, strict=True)):
            if not self._is_low(result) or not isinstance(origin, int):
                continue
            made = behind(self._visits, origin, _CASTS)
            if i == 0 and getattr(result.aval, "shape", None) == ():
                yield Risk("loss", self._visits[origin])
            elif isinstance(made, int) and self._updates(self._visits[made], result):
                yield Risk("update", self._visits[made])

    def _updates(self, visit: Visit, result: Any) -> bool:
        """Whether an equation adds to a parameter of the result's shape, or to a share of it."""
        return visit.eqn.primitive.name in _SHIFTS and any(
            aval_of(v).shape == aval_of(result).shape and self._is_parameter(self._unscaled(origin))
            for v, origin in zip(visit.eqn.invars, visit.origins, strict=True)
        )

    def _unscaled(self, origin: Origin) -> Origin:
        """Returns where a value comes from, before it is scaled by a number, as an average is."""
        made = behind(self._visits, origin, _CASTS)
        if not isinstance(made, int):
            return made
        visit = self._visits[made]
        pairs = zip(visit.origins, visit.plan.given, strict=True)
        others = [x for x, state in pairs if state.known_value is None]
        is_scaling = visit.eqn.primitive.name in _ARITHMETIC - _SHIFTS and len(others) == 1
        return others[0] if is_scaling else made


def _counted(visit: Visit) -> float | None:
    """Returns the bound of the integers that an equation turns into floats, None for others."""
    (result, *_), (state, *_) = visit.eqn.outvars, visit.plan.results
    if float_dtype(result.aval) is None:
        return None
    if not visit.eqn.invars:
        return state.integer_bound  # an iota
    declared = getattr(visit.eqn.invars[0].aval, "dtype", None)
    counts = isinstance(declared, np.dtype) and declared.kind in "iu" and declared.itemsize > 1
    return state.integer_bound if counts and cast_dtype(visit.eqn) is not None else None
