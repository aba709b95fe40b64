"""`Totals`: sums over the rows of a report."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax.numpy as jnp

from ...interpreters.after.kept_wide import GUARDS
from ...interpreters.compat import assumed_size
from ...interpreters.plan.data import ReasonCode
from ...policies import CONTRACTIONS
from .jaxprs import Casts
from .rows import Row


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the rows of a report; the equations in a loop count in each iteration.

    Args:
        equations: The number of equations, each counted once.
        flops: Estimated floating point operations.
        contraction_flops: The FLOPs of matmuls and convolutions.
        low_contraction_flops: The FLOPs of matmuls and convolutions with 16-bit or 8-bit operands.
        guarded_contraction_flops: The FLOPs of matmuls and convolutions that `autocast` keeps in
            float32 for the reason ``COORD`` or ``LITERAL``, without a request of the user.
        float8_contraction_flops: The FLOPs of matmuls with 8-bit operands.
        wide_kernel_flops: The FLOPs of matmuls in the kernels that stay in float32, as far as the
            jaxprs of these kernels show them. No other field includes these FLOPs.
        casts: The casts of the rewritten program, including those that the user wrote.
        parameters: The number of parameter arrays.
        cast_parameters: The number of 16-bit copies of parameters.
        quantized_parameters: The number of 8-bit copies of whole parameters.
        residual_nbytes: The bytes of the residuals of `jax.vjp` of the rewritten program, with
            respect to the parameters, or to all float inputs of a program without parameters. Each
            array counts once. Inputs, moved or cast parameters, and constants do not count; 8-bit
            copies of parameters do. XLA may keep less: it merges equal arrays and recomputes cheap
            ones. None for a program that contains a backward pass, or that JAX cannot
            differentiate.
        float32_residual_nbytes: The bytes of the residuals in float32; None if ``residual_nbytes``
            is None.
        declared_residual_nbytes: The bytes of the residuals of the program as it is written, in
            float32. None if ``residual_nbytes`` is None, or with `keep_less`.
        residual_error: The error of JAX if it cannot differentiate the program, else ``""``.
        unknown: Names of primitives without a rule: their operands keep the declared dtypes.
        unmatched_scopes: Scope patterns of the policy that match no equation.
        loops_of_unknown_length: The number of ``while`` loops, whose body counts once.

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
    wide_kernel_flops: int
    casts: Casts
    parameters: int
    cast_parameters: int
    quantized_parameters: int
    residual_nbytes: int | None
    float32_residual_nbytes: int | None
    declared_residual_nbytes: int | None
    residual_error: str
    unknown: tuple[str, ...]
    unmatched_scopes: tuple[str, ...]
    loops_of_unknown_length: int

    @property
    def float8_share(self) -> float:
        """The share of matmul and convolution FLOPs on 8-bit operands; 0 without a matmul.

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
        """The share of matmul and convolution FLOPs on 16- or 8-bit operands; 1 without a matmul.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain, full_precision
            >>> def half_and_half(x):
            ...     with full_precision():
            ...         y = x @ x
            ...     return y @ x
            >>> explain(half_and_half, jnp.ones((8, 8)), policy=BF16).totals.low_share
            0.5
        """
        flops = self.contraction_flops
        return self.low_contraction_flops / flops if flops else 1.0


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of one dtype in a program.

    Args:
        flops: The FLOPs of the equations whose widest float operand has the dtype. Without a float
            operand, the first result decides.
        nbytes: The bytes of operands and results with the dtype. Equations with bodies do not
            count; the equations in their bodies do.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> x = jnp.ones((4, 8))
        >>> explain(jnp.matmul, x, x.T, policy=BF16).by_dtype()["bfloat16"].flops
        256
    """

    flops: int
    nbytes: int


def by_dtype(rows: Sequence[Row]) -> dict[str, Share]:
    """Returns the share of each dtype in the rows of a report, the most bytes first."""
    flops: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for row in rows:
        flops[dtype_of(row)] += row.flops
        if not row.inner:
            shapes = (*row.operand_shapes, *row.result_shapes)
            for name, shape in zip((*row.operands, *row.results), shapes, strict=True):
                nbytes[name] += row.times * assumed_size(math.prod(shape)) * item_size(name)
    names = sorted(flops.keys() | nbytes.keys(), key=lambda name: (-nbytes[name], name))
    return {name: Share(flops[name], nbytes[name]) for name in names if flops[name] + nbytes[name]}


def guarded(rows: Iterable[Row]) -> list[Row]:
    """Returns the matmuls and convolutions with reason COORD or LITERAL, the most FLOPs first."""
    found = [r for r in rows if r.primitive in CONTRACTIONS and ReasonCode(r.reason) in GUARDS]
    return sorted(found, key=lambda row: -row.flops)


def is_low(name: str) -> bool:
    """Returns whether a name is that of a float dtype of fewer than 32 bits."""
    return is_float(name) and item_size(name) < 4


def dtype_of(row: Row) -> str:
    """Returns the dtype of a row's widest float operand, or of its first result without one."""
    floats = [name for name in row.operands if is_float(name)]
    return max(floats, key=item_size) if floats else (*row.results, "")[0]


def is_float(name: str) -> bool:
    """Returns whether a name is that of a real or complex floating point dtype."""
    return "float" in name or "complex" in name


@functools.cache
def item_size(name: str) -> int:
    """Returns the bytes of one element, 0 for a dtype unknown to NumPy, such as a random key."""
    try:
        return jnp.dtype(name).itemsize
    except TypeError:
        return 0
