"""What a rule function sees of an equation: plain data, no tracers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class EquationView:
    """One equation of the traced program, as a rule function sees it.

    Args:
        primitive: The primitive's name, such as ``"dot_general"``.
        params: The primitive's parameters.
        operand_shapes: The shape of each operand.
        operand_dtypes: The dtype of each operand as the program declares it (before any cast),
            None where an operand has none.
        result_shapes: The shape of each result.
        result_dtypes: The declared dtype of each result.
        literals: The value of each operand that is a scalar known at trace time, else None.
        scope: The names of the enclosing ``jax.named_scope`` scopes, joined by ``/``. Flax and
            Haiku put module paths there.
        compute_dtype: The 16-bit dtype in force for this equation.
        summarize_source: Returns the user's source line; called only when asked.

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
    summarize_source: Callable[[], str] = dataclasses.field(repr=False)

    @functools.cached_property
    def source(self) -> str:
        """The user's source line, such as ``"model.py:42 (Net.__call__)"``."""
        return self.summarize_source()

    @property
    def reduction_depth(self) -> int:
        """The number of products or elements that are summed into one result element.

        The contracted size of a matmul, input features times window of a convolution, the reduced
        or accumulated size of a reduction, 1 for everything else.
        """
        if self.primitive == "dot_general":
            (contracting, _), _ = self.params["dimension_numbers"]
            return math.prod(self.operand_shapes[0][d] for d in contracting)
        if self.primitive == "ragged_dot_general":
            (contracting, _), _ = self.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
            return math.prod(self.operand_shapes[0][d] for d in contracting)
        if self.primitive == "conv_general_dilated":
            kernel = self.operand_shapes[1]
            out_features = self.params["dimension_numbers"].rhs_spec[0]
            return math.prod(kernel) // max(kernel[out_features], 1)
        if "axes" in self.params and self.primitive.startswith("reduce_"):
            return math.prod(self.operand_shapes[0][d] for d in self.params["axes"])
        if self.primitive.startswith("cum"):
            return self.operand_shapes[0][self.params["axis"]]
        return 1

    @property
    def flops(self) -> int:
        """Estimated floating point operations: two per product summed, one per result element."""
        results = sum(math.prod(shape) for shape in self.result_shapes)
        if self.primitive in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            return 2 * results * self.reduction_depth
        return results * self.reduction_depth
