"""The argument of a rule function: an equation as plain data, without tracers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class EquationView:
    """One equation of the traced program, for a rule function.

    Args:
        primitive: The primitive's name, such as ``"dot_general"``.
        params: The primitive's parameters. JAX may rename them in any release, unlike the
            attributes `reduction_depth`, `exponent` and `function`.
        operand_shapes: The shape of each operand.
        operand_dtypes: The dtype of each operand as the program declares it (before any cast),
            None for an operand without one.
        result_shapes: The shape of each result.
        result_dtypes: The declared dtype of each result.
        literals: The value of each operand that is a scalar known at trace time; None for any other
            operand.
        scope: The names of the enclosing ``jax.named_scope`` scopes, joined by ``/``. Flax and
            Haiku put module paths there.
        compute_dtype: The 16-bit dtype in force for this equation.
        function: The name of the function that the equation calls, such as a jitted function or one
            with a custom derivative; ``""`` if the equation is no call.
        exponent: The exponent of an ``integer_pow``, None for another primitive.
        free_dimensions: For a ``dot_general`` or ``ragged_dot_general``, the number of dimensions
            of each operand that are neither contracted nor batch dimensions; None for another
            primitive.
        summarize_source: A function that computes `source` when a rule reads it.
        count_depth: A function that computes `reduction_depth`.
        count_flops: A function that computes `flops`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, CastPolicy, autocast
        >>> def small_stays_full(eqn):
        ...     return CastPolicy.PROMOTE if eqn.flops < 1000 else CastPolicy.LOWER_PRECISION_FP
        >>> policy = BF16.with_rules({"dot_general": small_stays_full})
        >>> f = autocast(jnp.matmul, policy=policy, output_dtype="computed")
        >>> f(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype
        dtype('float32')
        >>> f(jnp.ones((64, 64)), jnp.ones((64, 64))).dtype
        dtype(bfloat16)
    """

    primitive: str
    params: Mapping[str, Any]
    operand_shapes: tuple[tuple[int, ...], ...]
    operand_dtypes: tuple[np.dtype | None, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    result_dtypes: tuple[np.dtype | None, ...]
    literals: tuple[float | None, ...]
    scope: str
    compute_dtype: np.dtype
    function: str
    exponent: int | None
    free_dimensions: tuple[int, int] | None
    summarize_source: Callable[[], str] = dataclasses.field(repr=False)
    count_depth: Callable[[], int] = dataclasses.field(repr=False)
    count_flops: Callable[[], int] = dataclasses.field(repr=False)

    @functools.cached_property
    def source(self) -> str:
        """The user's source line, such as ``"model.py:42 (Net.__call__)"``.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, CastPolicy, explain
            >>> def rule(eqn):
            ...     return CastPolicy.FP32 if "head" in eqn.source else CastPolicy.PROMOTE
            >>> def head(x):
            ...     return jnp.tanh(x)
            >>> report = explain(head, jnp.ones(2), policy=BF16.with_rules({"tanh": rule}))
            >>> report.rows[0].rule
            'rule'
        """
        return self.summarize_source()

    @property
    def reduction_depth(self) -> int:
        """The number of products or elements that are summed into one result element.

        For a matmul it is the contracted size, for a convolution the input features times the
        window, for a reduction the reduced or accumulated size, and for any other primitive 1.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, CastPolicy, explain
            >>> def long_sums_stay_full(eqn):
            ...     deep = eqn.reduction_depth > 1000
            ...     return CastPolicy.FP32 if deep else CastPolicy.LOWER_PRECISION_FP
            >>> policy = BF16.with_rules({"dot_general": long_sums_stay_full})
            >>> for depth in (8, 4096):
            ...     report = explain(
            ...         jnp.dot, jnp.ones((2, depth)), jnp.ones((depth, 2)), policy=policy
            ...     )
            ...     print(report.rows[0].operands)
            ('bfloat16', 'bfloat16')
            ('float32', 'float32')
        """
        return self.count_depth()

    @property
    def flops(self) -> int:
        """The estimated floating point operations.

        These are two for each summed product of a matmul or convolution, one for each element that
        is reduced, and one for each element of any other result.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, CastPolicy, explain
            >>> seen = []
            >>> def rule(eqn):
            ...     seen.append(eqn.flops)
            ...     return CastPolicy.LOWER_PRECISION_FP
            >>> policy = BF16.with_rules({"dot_general": rule})
            >>> _ = explain(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 4)), policy=policy)
            >>> set(seen)
            {48}
        """
        return self.count_flops()
