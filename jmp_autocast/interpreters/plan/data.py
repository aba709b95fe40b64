"""The data that planning produces and everything else reads: `Plan` and its parts.

Nothing here traces, or applies a policy: the rewriter, `explain` and tests read finished plans.
Reading order: `ValueState` (the facts about a value), `Request` (what is requested of an
output), `Context` (an equation in its context), the actions (how an equation is
emitted), `EquationPlan`, `Plan`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...policies import Policy
from ..compat import AnyJaxpr, Atom, JaxprEqn, Literal
from ..regions import Region
from .avals import float_dtype
from .constant_range import ConstantRange
from .copies import CopyKey, Tag, products_of
from .marks import GIVEN, NONE, PARAMETER, Marks
from .needs import NOTHING, Need

_NUMBERS = (bool, int, float, np.generic, np.ndarray)

READ_BY = "read by "
"""The prefix of a `Reason.cause` that names a consumer by its primitive or its need."""


class ReasonCode(enum.Enum):
    """Why a value has its dtype. The names are stable; reports and tests rely on them."""

    SOURCE = "SOURCE"  # an input of the program, or data movement of one
    LOWER_PRECISION = "LOWER_PRECISION"
    FP32 = "FP32"
    PROMOTE_LOW = "PROMOTE_LOW"  # all voting operands are 16-bit
    PROMOTE_FULL = "PROMOTE_FULL"  # a voting operand is float32
    NO_PRODUCT = "NO_PRODUCT"  # no chain of elementwise and move consumers ends at a product
    KEEP = "KEEP"  # the policy keeps the declared dtypes
    UNKNOWN = "UNKNOWN"  # no rule for the primitive: kept, and reported
    DOMAIN = "DOMAIN"  # an operand has a dtype that autocast leaves alone, such as float8
    SCOPE = "SCOPE"  # a scope keeps the region in its declared dtypes
    USER_CAST = "USER_CAST"  # the program casts the value
    USER_PRECISION = "USER_PRECISION"  # the program sets a precision or a dot algorithm
    LITERAL = "LITERAL"  # a literal or constant that the compute dtype cannot hold
    COORD = "COORD"  # integer coordinates too large for the compute dtype
    FEEDER = "FEEDER"  # every consumer runs in float32
    CLEAR_NARROW = "CLEAR_NARROW"  # every consumer is 16-bit; the equation commutes with rounding
    LOG_GUARD = "LOG_GUARD"  # a consumer needs the value's logarithm or distance to 1
    DOT_OUT = "DOT_OUT"  # a contraction returns its float32 accumulator
    FLOAT8 = "FLOAT8"  # a product of a weight in 8 bits
    NOT_FLOAT8 = "NOT_FLOAT8"  # a matmul in the compute dtype, although a rule sets float8
    EMIT = "EMIT"  # a rule emits a function of its own in place of the equation
    ACCUMULATOR = "ACCUMULATOR"  # an accumulator, such as a residual stream
    CARRY = "CARRY"  # a loop carry keeps its declared dtype
    CARRY_ACCUMULATOR = "CARRY_ACCUMULATOR"
    BRANCH_JOIN = "BRANCH_JOIN"  # the branches of a cond return different dtypes
    STRUCTURAL = "STRUCTURAL"  # an equation with bodies, or a cast that changes no dtype
    NO_FLOAT = "NO_FLOAT"  # the equation has no floats


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """A reason code and what caused it.

    Args:
        code: The code.
        cause: The operand, consumer, scope or rule that caused it, in words.
        operands: The positions of the operands that caused it.
    """

    code: ReasonCode
    cause: str = ""
    operands: tuple[int, ...] = ()


class Source(enum.Enum):
    """The kind of a source: a value that is not computed, or only from sources."""

    LITERAL = "literal"  # every element equals one value known at trace time
    CONST = "const"  # a constant of the jaxpr, or a cast bool or byte
    PARAM = "param"  # an argument that `params=` selects
    DATA = "data"  # any other argument


@dataclasses.dataclass(frozen=True, slots=True)
class ValueState:
    """The facts about one value that planning uses.

    Args:
        dtype: The dtype that the value has when the program runs; None for a value that is no
            float array in autocast's domain.
        source: What kind of source it is, None for a computed value.
        known_value: The value of every element, if known at trace time.
        const_range: The range of a constant's elements, None for anything else.
        loop_invariant: The value is the same in each iteration of a loop: it is cast before the
            loop.
        narrowed_by_user: The program itself has cast it to 16 bits.
        may_be_rounded: A source that may be rounded even before it is added: bools or bytes, which
            every float dtype holds, or a selection of these, of literals and of constants within
            [-1, 1].
        tag: An extension's data about a parameter, or about a function of parameters only.
        is_looked_up: Rows that a gather has picked from a parameter, and that were only moved
            since.
        was_rounded: A float32 value that is an elementwise function of 16-bit values; see
            `votes.rounded_stream`.
        marks: The marks of an input or a constant of a jaxpr; not set for other values.
        is_shared: Several equations read it in float32; set for operands of moves and of calls.
    """

    dtype: np.dtype | None
    source: Source | None = None
    known_value: float | None = None
    const_range: ConstantRange | None = None
    loop_invariant: bool = False
    narrowed_by_user: bool = False
    may_be_rounded: bool = False
    tag: Tag | None = None
    is_looked_up: bool = False
    was_rounded: bool = False
    marks: Marks = NONE
    is_shared: bool = False

    def __hash__(self) -> int:
        # States are hashed for each equation. Two fields are enough: few states differ in others
        # alone.
        return hash((self.dtype, self.known_value))

    @property
    def is_computed(self) -> bool:
        """Whether the value is a float that is no source."""
        return self.dtype is not None and self.source is None

    @property
    def keeps_gradient(self) -> bool:
        """Whether the value is a source with a gradient, which is added up in float32.

        A literal has no gradient, and neither has another value that is known at trace time.
        """
        return self.source not in (None, Source.LITERAL) and self.known_value is None


def input_states(
    variables: Sequence[Atom], sources: Sequence[Source], policy: Policy
) -> list[ValueState]:
    """Returns the states of the inputs of a program.

    Args:
        variables: The inputs.
        sources: The kind of each input.
        policy: The policy of the program.
    """
    products = products_of(policy)
    tag = None if products is None else products.tag

    @functools.cache
    def state(dtype: np.dtype | None, source: Source) -> ValueState:
        if dtype is None:
            return ValueState(None)
        if source is Source.PARAM:
            return ValueState(dtype, source, tag=tag, marks=PARAMETER)
        return ValueState(dtype, source, marks=GIVEN)

    return [state(float_dtype(v.aval), s) for v, s in zip(variables, sources, strict=True)]


def literal_state(literal: Literal) -> ValueState:
    """Returns the state of a literal of a jaxpr.

    Args:
        literal: The literal.
    """
    dtype = float_dtype(literal.aval)
    shape = getattr(literal.aval, "shape", None)
    if shape == () and isinstance(literal.val, _NUMBERS):
        value = np.asarray(literal.val)
        if value.dtype.kind in "iufb" or dtype is not None:
            return ValueState(dtype, dtype and Source.LITERAL, float(value))
    return ValueState(dtype, dtype and Source.CONST)


class Request(NamedTuple):
    """What is requested of an output of a jaxpr.

    Args:
        dtype: The dtype that the output must have, None for any.
        needs: The needs of its consumers outside the jaxpr, as a `needs.Need`.
    """

    dtype: np.dtype | None = None
    needs: Need = NOTHING


class Context(NamedTuple):
    """An equation in its context: all that its plan depends on.

    Args:
        eqn: The equation.
        name: The name of its primitive.
        given: The facts about each operand.
        floats: The positions of the float operands.
        policy: The policy of the program.
        region: The precision of the scope that the equation is in.
        requests: The request for each result of an equation with bodies; empty for others.
        marks: The marks of its operands.
        need: The needs of its first result.
        kind: As for `mark_sweep.AllMarks`.
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
    kind: int | None

    @property
    def compute_dtype(self) -> np.dtype:
        """The compute dtype of the region, which is not None."""
        assert self.region.compute_dtype is not None
        return self.region.compute_dtype

    def declared(self, atom: Atom) -> np.dtype | None:
        """Returns the declared dtype of a value, None for values other than floats."""
        return float_dtype(atom.aval)


# --- actions: how an equation is emitted -----------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The equation is bound as it was traced, on operands that have their declared dtypes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bind:
    """The equation's primitive is bound, after casts of its operands.

    Args:
        params: Parameters that replace the equation's own.
        replicates: Positions of operands that the equation broadcasts. Each is also broadcast in
            float32, for the derivative alone: the transpose then adds up its cotangents in float32.
        biases: The positions in ``replicates`` whose summed gradient is rounded, as in a model
            written by hand. A TPU then adds up the cotangents in the kernel that computes them.
    """

    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicates: tuple[int, ...] = ()
    biases: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The elements of a source are moved, or those of its 16-bit copy for 16-bit consumers.

    Args:
        unchanged: The operands have their declared dtypes.
    """

    unchanged: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A cast of the program to the planned dtype, left out if the operand has this dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contract:
    """A contraction of 16-bit operands with a float32 accumulator.

    The accumulator is returned unrounded: as the result, if the planned result is float32, and as
    the gradient of each operand that is a source.

    Args:
        of_sources: False if the gradients of sources are rounded, too.
        params: As for `Bind`.
    """

    of_sources: bool = True
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Redispatch:
    """The equation holds a jaxpr of a fixed dtype (a scatter's update), and is traced anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inside:
    """The jaxprs that the equation holds are rewritten.

    Args:
        plans: A plan per body, in the order of `structure.bodies`.
        unchanged: Neither the bodies nor the operands change.
        inlined: The equations of the body replace the call, because it returns rows of a parameter.
    """

    plans: tuple[Plan, ...]
    unchanged: bool = False
    inlined: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Emit:
    """A function of a rule, or of an extension, is called in place of the equation.

    Args:
        function: Takes the operands and the copies; returns the result, or a tuple of results.
        name: Its name in reports.
        copies: Pairs (operand, key) of the copies that the function takes.
        as_they_are: Operands that are not cast, because the function reads their copies.
        reads: The dtype in which the function reads each operand; empty if it reads each in its
            dtype after the plan's casts.
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


Action = Keep | Bind | Move | Cast | Contract | Redispatch | Inside | Emit | Stored

# Most equations of a program have one of the actions `KEEP` and `BIND`, and share these objects.
KEEP = Keep()
BIND = Bind()


@dataclasses.dataclass(frozen=True)
class EquationPlan:
    """How one equation is emitted; equations with equal parameters and contexts share it.

    Args:
        action: How it is emitted.
        given: The facts about each operand.
        operands: The dtype that each operand is cast to, None for no cast.
        results: The facts about each result.
        reason: Why the equation runs in its dtypes.
        casts: The dtype that each result is cast to afterwards, or None; empty when none is.
    """

    action: Action
    given: tuple[ValueState, ...]
    operands: tuple[np.dtype | None, ...]
    results: tuple[ValueState, ...]
    reason: Reason
    casts: tuple[np.dtype | None, ...] = ()

    @functools.cached_property
    def inner(self) -> tuple[Plan, ...]:
        """The plans of the jaxprs that the equation holds."""
        return self.action.plans if isinstance(self.action, Inside) else ()

    @property
    def copies(self) -> tuple[tuple[int, CopyKey], ...]:
        """Pairs (operand, key) of the copies by which tagged operands are read."""
        if not isinstance(self.action, Emit):
            return ()
        return tuple([(i, k) for i, k in self.action.copies if self.given[i].tag is not None])

    @functools.cached_property
    def reads(self) -> tuple[np.dtype | None, ...]:
        """The dtype in which the equation reads each operand, None for a value that is no float."""
        if isinstance(self.action, Emit) and self.action.reads:
            return self.action.reads
        pairs = zip(self.operands, self.given, strict=True)
        return tuple(dtype or state.dtype for dtype, state in pairs)

    @functools.cached_property
    def unchanged(self) -> bool:
        """Whether neither the equation nor its bodies change."""
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
        outputs: The facts about each output, after the casts to ``output_dtypes``.
        output_dtypes: The dtype that each output is cast to on return, None for no cast.
        identity: The rewritten jaxpr is the jaxpr itself.
        path: The enclosing scopes that the policy's patterns can match.
    """

    jaxpr: AnyJaxpr
    consts: tuple[ValueState, ...]
    inputs: tuple[ValueState, ...]
    requests: tuple[Request, ...]
    equations: tuple[EquationPlan, ...]
    outputs: tuple[ValueState, ...]
    output_dtypes: tuple[np.dtype | None, ...]
    identity: bool
    path: tuple[str, ...]
