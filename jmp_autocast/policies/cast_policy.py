"""The vocabulary of rules: the cast policies, and what a rule may be and return."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TypeAlias

from jax.typing import DTypeLike

from .dtypes import FLOAT32, as_dtype, as_float_dtype
from .equation_view import EquationView


class CastPolicy(enum.Enum):
    """What happens to the float operands of an equation.

    The first five members are those of PyTorch's autocast (``ATen/autocast_mode.h``); ``KEEP`` is
    ours. Only values that the program declares as float32, or in the compute dtype, are ever
    cast: float64, complex, float8, the other half dtype, integers, bools and keys pass through.

    Attributes:
        LOWER_PRECISION_FP: Operands are cast to the compute dtype.
        FP32: Operands are cast to float32, and the result is float32.
        FP32_SET_OPT_DTYPE: A reduction: it accumulates in and returns float32. A narrowing of the
            result that the user wrote is an equation of its own and stands.
        FP32_APPEND_DTYPE: An operation whose computation has a fixed dtype (``scatter-add``
            carries its adder as a jaxpr): it is emitted again in its float32 form.
        PROMOTE: Operands are cast to the widest dtype among the operands that vote.
        KEEP: Operands are handed over in the dtypes that the program declared.

    Example:
        >>> from jmp_autocast import CastPolicy
        >>> CastPolicy["FP32"]
        <CastPolicy.FP32: 'fp32'>
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    FP32 = "fp32"
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    PROMOTE = "promote"
    KEEP = "keep"


FULL_POLICIES = frozenset(
    {CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a rule function decides for one equation.

    Args:
        policy: The cast policy of the equation.
        output_dtype: The dtype of the float results, None for what the policy computes in. It is
            reached by a cast after the operation: ``Decision(policy=CastPolicy.FP32,
            output_dtype=jnp.bfloat16)`` computes in float32 and returns bfloat16.
        accumulate_dtype: The dtype of a matmul's or convolution's accumulator. None and float32
            are the same (16-bit operands accumulate in float32 on every XLA backend); any other
            value is an error.

    Raises:
        TypeError: ``policy`` is no ``CastPolicy``.
        ValueError: A dtype is not one of those allowed.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import CastPolicy, Decision
        >>> Decision(policy=CastPolicy.FP32, output_dtype=jnp.bfloat16).output_dtype
        dtype(bfloat16)
    """

    policy: CastPolicy
    output_dtype: DTypeLike | None = None
    accumulate_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, CastPolicy):
            raise TypeError(
                f"Decision.policy must be a CastPolicy, one of {[p.name for p in CastPolicy]}, "
                f"got {self.policy!r}."
            )
        if self.output_dtype is not None:
            dtype = as_float_dtype(self.output_dtype, "Decision.output_dtype")
            object.__setattr__(self, "output_dtype", dtype)
        if self.accumulate_dtype is not None:
            dtype = as_dtype(self.accumulate_dtype, "Decision.accumulate_dtype")
            if dtype != FLOAT32:
                raise ValueError(
                    "Decision.accumulate_dtype must be float32 or None: XLA accumulates 16-bit "
                    f"operands in float32. Got {dtype}."
                )
            object.__setattr__(self, "accumulate_dtype", dtype)


Rule: TypeAlias = CastPolicy | Callable[[EquationView], CastPolicy | Decision]
"""A cast policy, or a function from an equation to a policy or a `Decision`."""


def apply_rule(rule: Rule, view: EquationView) -> Decision:
    """Evaluates a rule on one equation.

    Args:
        rule: A cast policy or a rule function.
        view: The equation.

    Returns:
        The decision, with plain policies wrapped.

    Raises:
        TypeError: The rule function returned something else than a policy or a decision.

    Example:
        >>> apply_rule(CastPolicy.FP32, view=None).policy
        <CastPolicy.FP32: 'fp32'>
    """
    decided = rule if isinstance(rule, CastPolicy) else rule(view)
    if isinstance(decided, CastPolicy):
        return Decision(policy=decided)
    if isinstance(decided, Decision):
        return decided
    raise TypeError(
        f"The rule for primitive {view.primitive!r}, {_name(rule)}, returned {decided!r} of type "
        f"{type(decided).__name__}; a rule must return a CastPolicy or a Decision."
    )


def _name(rule: object) -> str:
    return getattr(rule, "__qualname__", None) or repr(rule)
