"""What the code of each reason says: the text of docs/reasons.md and of the HTML report."""

from __future__ import annotations

import dataclasses

from ...interpreters.plan.data import ReasonCode


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a code says, in Markdown that uses code spans alone.

    Args:
        says: Why the equation runs in its dtypes.
        otherwise: What to do to have it otherwise, ``""`` where nothing can be done or need be.
    """

    says: str
    otherwise: str


EXPLANATIONS: dict[ReasonCode, Explanation] = {
    ReasonCode.LOWER_PRECISION: Explanation(
        "A matmul or convolution: both operands are read in the compute dtype.",
        "`full_precision()` around it, or `with_scopes`.",
    ),
    ReasonCode.FP32: Explanation(
        "The operation loses too much in 16 bits: its operands are read in float32.",
        '`policy.with_rules({"exp": "promote"})`',
    ),
    ReasonCode.PROMOTE_LOW: Explanation(
        "The widest operand that counts is in the compute dtype. Parameters, literals, and what is "
        "smaller than the result do not count.",
        '`policy.with_rules({"tanh": "fp32"})`',
    ),
    ReasonCode.PROMOTE_FULL: Explanation(
        "An operand that counts is float32; the cause names it. Follow it to the row that made it.",
        'Level `"compute"`, if it is an input of the program.',
    ),
    ReasonCode.KEEP: Explanation(
        "The rule keeps the declared dtypes: random bits, callbacks, foreign code.",
        "`policy.with_rules`",
    ),
    ReasonCode.UNKNOWN: Explanation(
        "No rule covers the primitive, so its operands keep the declared dtypes.",
        "`register_policy`",
    ),
    ReasonCode.DOMAIN: Explanation(
        "An operand is float64, complex, float8 or the other 16-bit dtype, which are never cast.",
        "Cast it in the program.",
    ),
    ReasonCode.SCOPE: Explanation(
        "A scope sets the precision of the region; the cause names it.",
        "Remove the scope.",
    ),
    ReasonCode.USER_CAST: Explanation(
        "The program casts here.",
        "Remove the cast.",
    ),
    ReasonCode.USER_PRECISION: Explanation(
        "The program asks for `precision=HIGHEST` or for a dot algorithm.",
        "Leave `precision` out.",
    ),
    ReasonCode.LITERAL: Explanation(
        "A literal or constant would become infinite, 0 or ±1 in the compute dtype, such as "
        "`-1e30` or `1e-8`.",
        "Write a number that the dtype can hold.",
    ),
    ReasonCode.COORD: Explanation(
        "Integer coordinates, such as positions, are larger than the compute dtype counts exactly.",
        "Nothing to mend: in 16 bits they would be wrong.",
    ),
    ReasonCode.FEEDER: Explanation(
        "Cheap arithmetic whose every reader runs in float32, so it does, too.",
        "The cause names the reader.",
    ),
    ReasonCode.CLEAR_NARROW: Explanation(
        "Data movement whose every reader is in 16 bits, so it moves the 16-bit copy.",
        "The cause names the reader.",
    ),
    ReasonCode.LOG_GUARD: Explanation(
        "A sigmoid or tanh that reaches a logarithm or a denominator.",
        "Nothing to mend: in 16 bits it would round to 0 or 1.",
    ),
    ReasonCode.DOT_OUT: Explanation(
        "A matmul or convolution with 16-bit operands that returns its float32 accumulator.",
        '`Policy(dot_output="compute")`, the default.',
    ),
    ReasonCode.EMIT: Explanation(
        "A rule emits a function in place of the equation; the cause names the function.",
        "Take the rule out of `with_rules`.",
    ),
    ReasonCode.CARRY: Explanation(
        "A loop carry keeps its declared dtype.",
        "Start the loop with a value that a matmul made.",
    ),
    ReasonCode.CARRY_ACCUMULATOR: Explanation(
        "A loop carry that adds up keeps float32.",
        "Nothing to mend: in 16 bits the sum would stop growing.",
    ),
    ReasonCode.BRANCH_JOIN: Explanation(
        "The branches of a `cond` return different dtypes, so all return float32.",
        "Make the branches alike.",
    ),
    ReasonCode.STRUCTURAL: Explanation(
        "A loop, branch or call: the rows after it say what happens inside.",
        "",
    ),
    ReasonCode.SOURCE: Explanation(
        "An input of the program, or data movement of one.",
        "",
    ),
    ReasonCode.NO_FLOAT: Explanation(
        "No float32 or 16-bit value takes part.",
        "",
    ),
}
