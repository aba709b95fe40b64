"""`Totals`: sums over the rows of a report."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from .jaxprs import Casts


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the rows of a report, with loops multiplied by their length.

    Args:
        equations: The number of equations in the program's text.
        flops: Estimated floating point operations.
        contraction_flops: Those of matmuls and convolutions.
        low_contraction_flops: Those of matmuls and convolutions with 16-bit or 8-bit operands.
        guarded_contraction_flops: Those of matmuls and convolutions that a guard (``COORD``,
            ``LITERAL``) keeps in float32, although nobody asked for it.
        float8_contraction_flops: Those of matmuls with 8-bit operands.
        casts: The casts of the program that runs; those that the program itself writes count too.
        parameters: The number of parameter arrays.
        cast_parameters: The number of 16-bit copies of parameters that are made.
        quantized_parameters: The number of 8-bit copies of whole parameters that are made.
        residual_nbytes: The bytes of activations that `jax.vjp` of the program that runs keeps for
            its backward pass, with respect to the parameters, or to all float inputs where there
            are none. Each array counts once; inputs, moved or cast parameters and constants do
            not, 8-bit copies of parameters do. The number is the jaxpr's: XLA may merge equal
            arrays and compute cheap ones again. None for a program that holds a backward pass
            itself, and for one that JAX cannot differentiate.
        float32_residual_nbytes: The bytes of those in float32.
        residual_error: What JAX said of a program that it cannot differentiate, else ``""``.
        unknown: Names of primitives without a rule: their operands keep the declared dtypes.
        unmatched_scopes: Scope patterns of the policy that no equation stands in.
        loops_of_unknown_length: The number of ``while`` loops, whose inside counts once.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> totals = explain(lambda params, x: x @ params["w"], {"w": x}, x, policy=BF16).totals
        >>> totals.parameters, totals.cast_parameters, totals.casts.down, totals.casts.up
        (1, 1, 2, 1)
    """

    _computed: ClassVar[tuple[str, ...]] = ("low_share", "float8_share")

    equations: int
    flops: int
    contraction_flops: int
    low_contraction_flops: int
    guarded_contraction_flops: int
    float8_contraction_flops: int
    casts: Casts
    parameters: int
    cast_parameters: int
    quantized_parameters: int
    residual_nbytes: int | None
    float32_residual_nbytes: int | None
    residual_error: str
    unknown: tuple[str, ...]
    unmatched_scopes: tuple[str, ...]
    loops_of_unknown_length: int

    @property
    def float8_share(self) -> float:
        """The share of matmul and convolution FLOPs on 8-bit operands; 0 if there are none.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import Float8, Policy, explain
            >>> policy = Policy(jnp.bfloat16, matmul=Float8(minimum=16, emulate=True))
            >>> def model(params, x):
            ...     return x @ params["hidden"] @ params["head"]
            >>> params = {"hidden": jnp.ones((16, 16)), "head": jnp.ones((16, 16))}
            >>> explain(model, params, jnp.ones((16, 16)), policy=policy).totals.float8_share
            0.5
        """
        flops = self.contraction_flops
        return self.float8_contraction_flops / flops if flops else 0.0

    @property
    def low_share(self) -> float:
        """The share of matmul and convolution FLOPs on 16-bit or 8-bit operands; 1 of none.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain, full_precision
            >>> def half_and_half(x):
            ...     with full_precision():
            ...         y = x @ x
            ...     return y @ x
            >>> explain(half_and_half, jnp.ones((4, 4)), policy=BF16).totals.low_share
            0.5
        """
        flops = self.contraction_flops
        return self.low_contraction_flops / flops if flops else 1.0
