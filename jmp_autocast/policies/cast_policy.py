"""Cast policies, and the types of rules and of their decisions."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from jax.typing import DTypeLike

from .callables import is_function, name_of
from .dtypes import FLOAT_DTYPES, as_float_dtype
from .equation_view import EquationView
from .errors import wrong_type
from .precisions import as_precision


class CastPolicy(enum.Enum):
    """The dtypes of the float operands of an equation.

    The first five members are those of PyTorch's autocast (``ATen/autocast_mode.h``); ``KEEP`` is
    ours. Only values that the program declares as float32, or in the compute dtype, are ever cast:
    float64, complex, float8, the other 16-bit dtype, integers, bools and keys pass through.

    Attributes:
        LOWER_PRECISION_FP: Operands are cast to the compute dtype.
        FP32: Operands are cast to float32, and the result is float32.
        FP32_SET_OPT_DTYPE: For a reduction: it accumulates in float32 and returns float32. If the
            user's code casts the result, that cast is an equation of its own and stays.
        FP32_APPEND_DTYPE: The operation is emitted in a form that returns float32. A matmul or
            convolution has such a form: its operands are cast to the compute dtype, and it returns
            its float32 accumulator without rounding. A ``scatter-add`` holds its addition as a
            jaxpr of a fixed dtype, so it is emitted with operands and addition in float32. Any
            other operation runs as under ``FP32``.
        PROMOTE: Between products, operands are cast to the widest dtype among the operands that
            vote (computed values always do, most parameters do not); elsewhere, to float32.
        KEEP: Operands keep the dtypes that the program declares.

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
    """The decision of a rule function for one equation: a cast policy, or a function to emit.

    Args:
        policy: The cast policy of the equation; None if ``emit`` is given.
        output_dtype: The dtype of the float results. None with a policy: the dtype that it computes
            in; None with ``emit``: the declared dtypes. With a policy, the result is cast after the
            operation: ``Decision(policy=CastPolicy.FP32, output_dtype=jnp.bfloat16)`` computes in
            float32 and returns bfloat16. With ``emit``, the function must return this dtype.
        emit: A function that is called in place of the equation. It takes the equation's operands
            as arrays, and returns its result, or a tuple of its results, with the shapes of the
            equation's results. The function is traced, so that JAX differentiates, batches and
            shards its operations; `autocast` casts nothing inside it.
        operand_dtype: The dtype in which ``emit`` gets the float operands; None for the declared
            dtypes.
        name: The name of ``emit`` in reports; None for the function's name.
        precision: The precision of a matmul or convolution that ``policy`` leaves in float32. It
            overrides a precision rule of the `Policy`; None leaves that rule in force.

    Raises:
        TypeError: ``policy`` is not a ``CastPolicy``, or ``emit`` is not a function.
        ValueError: A dtype is not allowed; or ``policy`` and ``emit`` are both given, or neither.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, CastPolicy, Decision, autocast
        >>> Decision(policy=CastPolicy.FP32, output_dtype=jnp.bfloat16).output_dtype
        dtype(bfloat16)
        >>> def rational_tanh(x):
        ...     return x * (27 + x * x) / (27 + 9 * x * x)
        >>> policy = BF16.with_rules({"tanh": lambda eqn: Decision(emit=rational_tanh)})
        >>> print(jax.grad(autocast(jnp.tanh, policy=policy))(0.0))
        1.0
    """

    policy: CastPolicy | None = None
    output_dtype: DTypeLike | None = None
    emit: Callable[..., Any] | None = None
    operand_dtype: DTypeLike | None = None
    name: str | None = None
    precision: Any = None

    def __post_init__(self) -> None:
        if self.policy is not None and not isinstance(self.policy, CastPolicy):
            raise TypeError(
                f"Decision.policy must be a CastPolicy, one of {[p.name for p in CastPolicy]}, "
                f"got {self.policy!r}."
            )
        if self.emit is not None and not is_function(self.emit):
            expected = "Decision.emit must be a function of the equation's operands"
            raise wrong_type(expected, self.emit)
        # If both were given, one would be ignored in silence.
        if (self.policy is None) == (self.emit is None):
            given = "neither" if self.policy is None else "both"
            raise ValueError(
                f"Decision takes a policy or a function to emit, got {given}. Write "
                "Decision(policy=CastPolicy.FP32) or Decision(emit=function)."
            )
        # Dtypes are normalized, so that decisions are equal however their dtypes are spelled.
        for field in ("output_dtype", "operand_dtype"):
            if getattr(self, field) is not None:
                dtype = as_float_dtype(getattr(self, field), f"Decision.{field}", FLOAT_DTYPES)
                object.__setattr__(self, field, dtype)
        if self.precision is not None:
            word = as_precision(self.precision, "Decision.precision")
            object.__setattr__(self, "precision", word)
            if self.emit is not None:
                raise ValueError(
                    "Decision.precision belongs to policy=, and a function was given by emit=. "
                    "The function sets the precision of its products itself."
                )
        if self.emit is None and (self.operand_dtype is not None or self.name is not None):
            raise ValueError(
                "Decision.operand_dtype and Decision.name belong to emit=, and a policy "
                f"({self.policy}) was given. A policy sets the dtypes of operands itself."
            )

    @property
    def emitted_name(self) -> str:
        """The name of the emitted function in reports.

        Example:
            >>> import functools, jax.numpy as jnp
            >>> from jmp_autocast import Decision
            >>> Decision(emit=functools.partial(jnp.clip, min=0.0)).emitted_name
            'clip'
        """
        function = self.emit
        # A rule may bind options to its function with `partial`; the name is that of the function.
        while isinstance(function, functools.partial):
            function = function.func
        return self.name or name_of(function)


Rule: TypeAlias = CastPolicy | Callable[[EquationView], "CastPolicy | Decision | None"]
"""A cast policy, or a function from an equation to a policy or a `Decision`.

Calls, loops and casts have no cast policy. A rule function for one of them returns a `Decision`
with ``emit``, or None to leave the equation as it is."""


def apply_rule(rule: Rule, view: EquationView) -> Decision:
    """Returns the decision of a rule for one equation; a cast policy is wrapped in a `Decision`.

    Raises:
        TypeError: The rule function returned neither a policy nor a decision.

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
        f"The rule for primitive {view.primitive!r}, {rule_name(rule)}, returned {decided!r} of "
        f"type {type(decided).__name__}; a rule must return a CastPolicy or a Decision."
    )


def rule_name(rule: object) -> str:
    """Returns the name of a rule function, for messages."""
    return getattr(rule, "__qualname__", None) or repr(rule)
