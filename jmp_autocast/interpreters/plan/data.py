"""The data that planning produces and everything else reads: `Plan` and its parts.

No JAX tracing here and no policy: rewriting, `explain` and the tests read a plan, they never
derive one. Reading order: `ValueState` (the facts about a value), `Request` (the request of its
consumers), `Context` (an equation in its context), the actions (how it is emitted), `EquationPlan`,
`Plan`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...policies import FLOAT32, Policy
from ..compat import AnyJaxpr, Atom, JaxprEqn, aval_of, is_array_aval
from ..regions import Region
from .constant_range import ConstantRange
from .copies import CopyKey, Tag
from .float_dtypes import float_dtype, is_16_bit
from .marks import NONE, Marks
from .needs import Need
from .reasons import Reason


class Source(enum.Enum):
    """The kind of a source: a value that is not computed, or only from sources."""

    LITERAL = "literal"  # every element equals one value known at trace time
    CONST = "const"  # closed over, or exact in any float dtype (a cast bool)
    PARAM = "param"  # an argument that `params=` selects
    DATA = "data"  # any other argument


@dataclasses.dataclass(frozen=True, slots=True)
class ValueState:
    """The facts of planning about one value.

    Args:
        dtype: The dtype that the value has when the program runs; None for a value that is no
            float array in autocast's domain.
        source: What kind of source it is, None for a computed value.
        known_value: The value of every element, if known at trace time.
        integer_bound: An upper bound of the magnitude of integer coordinates, None without one.
        const_range: The range of a constant's elements, None for anything else.
        loop_invariant: The same in each iteration of the loop around it: its cast belongs outside.
        narrowed_by_user: The program itself has cast it to 16 bits.
        may_be_rounded: A source of bools or bytes, which every float dtype holds, or of elements of
            those, of literals and of numbers within [-1, 1]: also where it is added.
        tag: An extension's data about a parameter, or about a function of parameters alone.
        is_looked_up: Rows of a parameter that a gather has picked, since then only moved.
        was_rounded: In float32, an elementwise function of 16-bit values: see `rounded_streams`.
        marks: How it is computed, whatever its dtype; for inputs of a jaxpr only.
        is_widened: Also read in float32 on the other side of the jaxpr boundary.
    """

    dtype: np.dtype | None
    source: Source | None = None
    known_value: float | None = None
    integer_bound: float | None = None
    const_range: ConstantRange | None = None
    loop_invariant: bool = False
    narrowed_by_user: bool = False
    may_be_rounded: bool = False
    tag: Tag | None = None
    is_looked_up: bool = False
    was_rounded: bool = False
    marks: Marks = NONE
    is_widened: bool = False

    def __hash__(self) -> int:
        # States are hashed for each equation; few differ in their other fields alone.
        return hash((self.dtype, self.known_value))

    @property
    def is_computed(self) -> bool:
        """Whether it is a float that an equation computes."""
        return self.dtype is not None and self.source is None

    @property
    def keeps_gradient(self) -> bool:
        """Whether 16-bit reads of it are views, which add its gradient up in float32.

        A literal, or a value that is known, has no gradient.
        """
        return self.source not in (None, Source.LITERAL) and self.known_value is None


class Use(enum.Flag):
    """The dtypes in which consumers read a value."""

    NONE = 0
    LOW = enum.auto()
    FULL = enum.auto()

    def __or__(self, other: Any) -> Use:
        return _USES[self._value_ | other._value_]

    def __and__(self, other: Any) -> Use:
        return _USES[self._value_ & other._value_]

    @classmethod
    def of(cls, dtype: np.dtype | None) -> Use:
        """Returns how a value is read in a dtype, None for values other than floats.

        Args:
            dtype: The dtype.
        """
        if dtype is None:
            return cls.NONE
        return cls.LOW if is_16_bit(dtype) else cls.FULL


# Looked up, and not computed as `enum` does.
_USES = tuple(map(Use, range(4)))


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request of the consumers of a value to its producer.

    Args:
        dtype: The dtype it must be returned in, None for any.
        use: The dtype of its consumers; NONE if either will do, or if it is not known yet.
        needs: Its needs outside, as `needs.Need`.
        fulls: How many consumers outside read it in float32, counted up to two.
        consumer: The primitive of its first consumer, for the reason's text. Two requests that
            differ only in names of primitives are equal, so that a jaxpr is planned once for both.
        is_known: All consumers outside are known.
    """

    dtype: np.dtype | None = None
    use: Use = Use.NONE
    needs: int = 0
    fulls: int = 0
    consumer: str = dataclasses.field(default="", compare=False)
    is_known: bool = False


class Context(NamedTuple):
    """An equation in its context: the facts, the requests, and the precision in force.

    Args:
        eqn: The equation.
        name: The name of its primitive.
        given: The facts about each operand.
        floats: The positions of the float operands.
        policy: The policy of the program.
        region: The precision of the scope that the equation is in.
        requests: The requests for each result; empty before the first backward sweep.
        marks: The marks of its operands.
        need: The needs of its first result.
        accumulates: It computes an accumulator: `marks`.
    """

    eqn: JaxprEqn
    name: str
    given: tuple[ValueState, ...]
    floats: Sequence[int]
    policy: Policy
    region: Region
    requests: tuple[Request, ...]
    marks: Sequence[Marks]
    need: Need
    accumulates: bool

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of matmuls here, where anything is lowered."""
        assert self.region.compute_dtype is not None
        return self.region.compute_dtype

    @property
    def foreign(self) -> tuple[int, ...]:
        """The positions of the float and complex operands that autocast never touches."""
        region = self.region
        ours = (FLOAT32, region.compute_dtype)
        avals = [(i, aval_of(v)) for i, v in enumerate(self.eqn.invars)]
        dtypes = [(i, aval.dtype) for i, aval in avals if is_array_aval(aval)]
        return tuple(
            [
                i
                for i, dtype in dtypes
                if isinstance(dtype, np.dtype) and dtype.kind in "fcV" and dtype not in ours
            ]
        )

    def joined(self, positions: Sequence[int]) -> np.dtype:
        """Returns the one dtype of some float operands, float32 if they differ."""
        first, *others = [self.given[i].dtype for i in positions]
        return FLOAT32 if first is None or any(d != first for d in others) else first

    def declared(self, atom: Atom) -> np.dtype | None:
        """Returns the declared dtype of a value, None for values other than floats."""
        return float_dtype(atom.aval)


# --- actions: how an equation is emitted -----------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The equation is bound as it was traced, on operands that have their declared dtypes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bind:
    """The equation's primitive is bound on operands that are cast first.

    Args:
        params: Parameters that replace the equation's own.
        replicates: Positions of operands that are smaller than the result. They are broadcast in
            float32 as well, for the derivative alone, so that the transposed sum runs in float32.
        biases: Those whose gradient is rounded once, after this sum, as by hand: a TPU then sums
            in the kernel that makes the cotangents.
    """

    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicates: tuple[int, ...] = ()
    biases: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The elements of a source are moved: the 16-bit copy is made from the operand's 16-bit copy.

    Args:
        unchanged: The operands have their declared dtypes.
    """

    unchanged: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A cast of the program: to the dtype of the plan's result, or none if it has that dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contract:
    """A contraction of 16-bit operands with a float32 accumulator.

    The accumulator is the result if the plan has a float32 result, and the gradient of operands
    that are sources.

    Args:
        of_sources: False where gradients of sources are rounded, as results are.
        params: As for `Bind`.
    """

    of_sources: bool = True
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Redispatch:
    """The equation carries a computation of a fixed dtype, and is emitted anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inside:
    """The jaxprs that the equation holds are rewritten.

    Args:
        plans: A plan per body, in the order of `structure.bodies`.
        unchanged: Neither the bodies nor the operands change.
        inlined: The equations of the body replace the call, which returns rows of a table.
    """

    plans: tuple[Plan, ...]
    unchanged: bool = False
    inlined: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Emit:
    """A function of a rule, or of an extension, is called in place of the equation.

    Args:
        function: From the operands, and the copies, to the result, or a tuple of results.
        name: Its name in reports.
        copies: Pairs (operand, key) of the copies of operands that it takes.
        as_they_are: Operands that it takes uncast: it reads their copies.
        reads: The dtypes in which operands take part; empty if they are the plan's operand dtypes.
    """

    function: Callable[..., Any]
    name: str
    copies: tuple[tuple[int, CopyKey], ...] = ()
    as_they_are: tuple[int, ...] = ()
    reads: tuple[np.dtype, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The equation decodes a stored array: its operands serve as the encoded copies of its result.

    Args:
        keys: The key of each operand as a copy of the result.
    """

    keys: tuple[CopyKey, ...]


_OfArrays = Keep | Bind | Cast | Contract | Redispatch | Emit
Action = _OfArrays | Move | Inside | Stored

# Most equations of a program have one of these two actions: one object each.
KEEP = Keep()
BIND = Bind()


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlan:
    """How one equation is emitted; equations that look alike share it.

    Args:
        action: How it is emitted.
        given: The facts about each operand.
        operands: The dtype in which each operand is read, None for "unchanged".
        results: The facts about each result.
        reason: Why the equation runs in its dtypes.
        casts: The dtype that each result is cast to afterwards, or None; empty when none is.
        uses: How each operand is read if it does not follow from the results' dtypes: by the
            bodies of a higher-order primitive, and by a cast of the program. Empty for others.
    """

    action: Action
    given: tuple[ValueState, ...]
    operands: tuple[np.dtype | None, ...]
    results: tuple[ValueState, ...]
    reason: Reason
    casts: tuple[np.dtype | None, ...] = ()
    uses: tuple[Use, ...] = ()

    @property
    def inner(self) -> tuple[Plan, ...]:
        """The plans of the jaxprs that the equation holds."""
        return self.action.plans if isinstance(self.action, Inside) else ()

    @property
    def copies(self) -> tuple[tuple[int, CopyKey], ...]:
        """Pairs (operand, key) of the copies by which tagged operands are read."""
        if not isinstance(self.action, Emit):
            return ()
        return tuple([(i, k) for i, k in self.action.copies if self.given[i].tag is not None])

    @property
    def reads(self) -> tuple[np.dtype | None, ...]:
        """The dtype in which each operand takes part, None for operands other than floats."""
        if isinstance(self.action, Emit) and self.action.reads:
            return self.action.reads
        pairs = zip(self.operands, self.given, strict=True)
        return tuple(dtype or state.dtype for dtype, state in pairs)

    @property
    def unchanged(self) -> bool:
        """Whether nothing inside or about the equation changes."""
        if isinstance(self.action, Move | Inside):
            return self.action.unchanged
        return isinstance(self.action, Keep)


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """The dtype and reason of every value and equation of one jaxpr.

    Args:
        jaxpr: The open jaxpr that is planned.
        consts: The facts about each constant.
        inputs: The facts about each input.
        requests: The request for each output.
        equations: A plan per equation, in program order.
        outputs: The facts about each output, after ``output_dtypes``.
        output_dtypes: The dtype that each output is cast to on return, None for "unchanged".
        uses: How the equations read each input.
        fulls: How many of them read it in float32, counted up to two.
        identity: Rewriting would give the jaxpr back unchanged.
        path: The enclosing scopes that the policy's patterns can match.
    """

    jaxpr: AnyJaxpr
    consts: tuple[ValueState, ...]
    inputs: tuple[ValueState, ...]
    requests: tuple[Request, ...]
    equations: tuple[EquationPlan, ...]
    outputs: tuple[ValueState, ...]
    output_dtypes: tuple[np.dtype | None, ...]
    uses: tuple[Use, ...]
    fulls: tuple[int, ...]
    identity: bool
    path: tuple[str, ...]
