"""The data that planning produces and everything else reads: `Plan` and its parts.

No JAX tracing here and no policy: rewriting, `explain` and the tests read a plan, they never
derive one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..policies import COMPUTE_DTYPES, FLOAT32
from .compat import is_array_aval
from .extent import Extent

# Calls, too, but with a derivative rule of the user's own.
CUSTOM_RULES = frozenset(("custom_jvp_call", "custom_vjp_call"))

FLOAT_DTYPES = frozenset((FLOAT32, *COMPUTE_DTYPES))


def float_dtype(aval: Any) -> np.dtype | None:
    """Returns the dtype of a float32, float16 or bfloat16 array, None for anything else."""
    dtype = getattr(aval, "dtype", None)
    return dtype if dtype in FLOAT_DTYPES and is_array_aval(aval) else None


class Leaf(enum.Enum):
    """What a value is that no computation produced (or only one on such values)."""

    LITERAL = "literal"  # every element equals one value known at trace time
    CONST = "const"  # closed over, or exact in any float dtype (a cast bool)
    PARAM = "param"  # an argument that `params=` selects
    DATA = "data"  # any other argument


class Code(enum.Enum):
    """Why a value has its dtype. The names are stable; reports and tests rely on them."""

    LEAF = "LEAF"  # an input of the program, or data movement of one
    LOWER_PRECISION = "LOWER_PRECISION"
    FP32 = "FP32"
    PROMOTE_LOW = "PROMOTE_LOW"  # all voting operands are low
    PROMOTE_FULL = "PROMOTE_FULL"  # a voting operand is float32
    KEEP = "KEEP"  # the policy keeps the declared dtypes
    UNKNOWN = "UNKNOWN"  # no rule for the primitive: kept, and reported
    DOMAIN = "DOMAIN"  # an operand autocast never touches: float64, the other half, float8
    SCOPE = "SCOPE"  # a scope keeps the region in its declared dtypes
    USER_CAST = "USER_CAST"  # the program casts
    USER_PRECISION = "USER_PRECISION"  # precision=HIGHEST or a dot algorithm
    LITERAL = "LITERAL"  # a literal or constant that the compute dtype cannot hold
    COORD = "COORD"  # integer coordinates too large for the compute dtype
    FEEDER = "FEEDER"  # every consumer runs in float32
    CLEAR_NARROW = "CLEAR_NARROW"  # every consumer is low and rounding commutes
    LOG_GUARD = "LOG_GUARD"  # reaches a logarithm or a denominator
    DOT_OUT = "DOT_OUT"  # the accumulator is emitted in float32
    CARRY = "CARRY"  # a loop carry keeps its declared dtype
    CARRY_ACCUMULATOR = "CARRY_ACCUMULATOR"
    BRANCH_JOIN = "BRANCH_JOIN"  # the branches of a cond disagree
    STRUCTURAL = "STRUCTURAL"  # decided inside
    NO_FLOAT = "NO_FLOAT"  # nothing to decide


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """A reason code and what caused it.

    Args:
        code: The code.
        cause: The operand, consumer, scope or rule that caused it, in words.
        operands: The positions of the operands among the causes.
    """

    code: Code
    cause: str = ""
    operands: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ValueState:
    """What planning knows of one value.

    Args:
        dtype: The dtype that the value has when the program runs; None for a value that is no
            float array in autocast's domain.
        leaf: What kind of leaf it is, None for a computed value.
        known: The value of every element, where known at trace time.
        bound: An upper bound of the magnitude of integer coordinates, None where it holds none.
        extent: The range of a constant's elements, None for anything else.
        narrowed: The program itself has cast it to 16 bits.
        returned: The dtype in which PyTorch returns it, None for ``dtype``. Only a caller that
            asks for the computed dtypes gets it; readers in the program read ``dtype``.
        invariant: The same in each iteration of the loop around it: its cast belongs outside.
    """

    dtype: np.dtype | None
    leaf: Leaf | None = None
    known: float | None = None
    bound: float | None = None
    extent: Extent | None = None
    invariant: bool = False
    narrowed: bool = False
    returned: np.dtype | None = None


class Demand(enum.Flag):
    """In which dtypes the users of a value read it."""

    NONE = 0
    LOW = enum.auto()
    FULL = enum.auto()

    @classmethod
    def of(cls, dtype: np.dtype | None) -> Demand:
        """Returns how a value is read in a dtype; None for what is no float."""
        if dtype is None:
            return cls.NONE
        return cls.FULL if dtype == FLOAT32 else cls.LOW


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the users of a value ask of who makes it.

    Args:
        dtype: The dtype it must be returned in, None for any.
        demand: FULL or LOW if all users read it so, and it should be made so.
        guarded: It reaches a logarithm or a denominator.
        reader: Who asks. Questions that differ in it alone have the same answer.
    """

    dtype: np.dtype | None = None
    demand: Demand = Demand.NONE
    guarded: bool = False
    reader: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlan:
    """How one equation is emitted; equations that look alike share it.

    Args:
        operands: The dtype in which each operand is read, None for "as it is".
        results: What is known of each result.
        reason: Why the equation runs in the dtypes it does.
        params: Parameters that replace the equation's own.
        casts: The dtype that each result is cast to afterwards, or None; empty when none is.
        inner: The plans of the jaxprs that a structural primitive holds.
        moves_leaf: The equation only moves the elements of a leaf: its 16-bit copy is made from
            the operand's 16-bit copy.
        replicates: Operands that are smaller than the result. They are broadcast in float32 as
            well, for the derivative alone, so that the transposed sum runs in float32.
        accumulates: A contraction of 16-bit operands emits the gradients of leaf operands, and its
            results if they are float32, from the float32 accumulator.
        redispatch: The equation carries a computation of fixed dtype and is emitted anew.
        demands: How a structural primitive's inside reads each operand; empty for others.
        low_copies: Pairs (operand, dtype) of leaves that a loop's body reads in a 16-bit dtype: it
            takes the copy as one more operand, so that the cast is outside the loop. A call inside
            the loop hands it on.
        opaque: The equation is bound with its own parameters, and what it holds is not planned.
        keep: Nothing inside or about the equation changes.
    """

    operands: tuple[np.dtype | None, ...]
    results: tuple[ValueState, ...]
    reason: Reason
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    casts: tuple[np.dtype | None, ...] = ()
    inner: tuple[Plan, ...] = ()
    moves_leaf: bool = False
    replicates: tuple[int, ...] = ()
    accumulates: bool = False
    redispatch: bool = False
    demands: tuple[Demand, ...] = ()
    low_copies: tuple[tuple[int, np.dtype], ...] = ()
    opaque: bool = False
    keep: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """The colour and reason of every value and equation of one jaxpr.

    Args:
        jaxpr: The open jaxpr that is planned.
        consts: What is known of each constant.
        inputs: What is known of each input.
        equations: A plan per equation, in program order.
        outputs: What is known of each output, after ``output_dtypes``.
        output_dtypes: The dtype that each output is cast to on return, None for "as it is".
        demands: How the equations read each input.
        low_copies: Pairs (input, dtype) of leaves that the equations read in a 16-bit dtype.
        unknown: Names of primitives without a rule, in order of appearance.
        identity: Rewriting would give the jaxpr back unchanged.
        path: The enclosing scopes, as far as the policy looks at them.
    """

    jaxpr: Any
    consts: tuple[ValueState, ...]
    inputs: tuple[ValueState, ...]
    equations: tuple[EquationPlan, ...]
    outputs: tuple[ValueState, ...]
    output_dtypes: tuple[np.dtype | None, ...]
    demands: tuple[Demand, ...]
    low_copies: tuple[tuple[int, np.dtype], ...]
    unknown: tuple[str, ...]
    identity: bool
    path: tuple[str, ...]
