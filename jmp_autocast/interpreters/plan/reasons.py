"""Why a value has its dtype: the codes that plans and reports give."""

from __future__ import annotations

import dataclasses
import enum

READ_BY = "read by "
"""The first words of a cause that is a consumer; its primitive, or the words of a need, follow."""


class ReasonCode(enum.Enum):
    """Why a value has its dtype. The names are stable; reports and tests rely on them."""

    SOURCE = "SOURCE"  # an input of the program, or data movement of one
    LOWER_PRECISION = "LOWER_PRECISION"
    FP32 = "FP32"
    PROMOTE_LOW = "PROMOTE_LOW"  # all voting operands are low
    PROMOTE_FULL = "PROMOTE_FULL"  # a voting operand is float32
    NO_PRODUCT = "NO_PRODUCT"  # no product consumes it through elementwise operations and moves
    KEEP = "KEEP"  # the policy keeps the declared dtypes
    UNKNOWN = "UNKNOWN"  # no rule for the primitive: kept, and reported
    DOMAIN = "DOMAIN"  # an operand of a dtype that autocast never touches here, such as float8
    SCOPE = "SCOPE"  # a scope keeps the region in its declared dtypes
    USER_CAST = "USER_CAST"  # the program casts
    USER_PRECISION = "USER_PRECISION"  # the program sets a precision or a dot algorithm
    LITERAL = "LITERAL"  # a literal or constant that the compute dtype cannot hold
    COORD = "COORD"  # integer coordinates too large for the compute dtype
    FEEDER = "FEEDER"  # every consumer runs in float32
    CLEAR_NARROW = "CLEAR_NARROW"  # every consumer is low and rounding commutes
    LOG_GUARD = "LOG_GUARD"  # a consumer needs its distance to 1, or its logarithm
    DOT_OUT = "DOT_OUT"  # the accumulator is emitted in float32
    FLOAT8 = "FLOAT8"  # a product of a weight in 8 bits
    NOT_FLOAT8 = "NOT_FLOAT8"  # a matmul in the compute dtype although a rule has 8 bits
    EMIT = "EMIT"  # a rule emits a function of its own in place of the equation
    ACCUMULATOR = "ACCUMULATOR"  # it is added to again and again
    CARRY = "CARRY"  # a loop carry keeps its declared dtype
    CARRY_ACCUMULATOR = "CARRY_ACCUMULATOR"
    BRANCH_JOIN = "BRANCH_JOIN"  # the branches of a cond disagree
    STRUCTURAL = "STRUCTURAL"  # its jaxprs have reasons of their own, or it casts nothing
    NO_FLOAT = "NO_FLOAT"  # nothing to decide


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """A reason code and what caused it.

    Args:
        code: The code.
        cause: The operand, consumer, scope or rule that caused it, in words.
        operands: The positions of the operands among the causes.
    """

    code: ReasonCode
    cause: str = ""
    operands: tuple[int, ...] = ()
