"""`Totals`: sums over the rows of a report."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax.numpy as jnp

from ...interpreters.after.kept_wide import is_guard
from ...interpreters.compat import assumed_size
from ...interpreters.plan.reasons import ReasonCode
from ...policies import CONTRACTIONS, E4M3
from .jaxprs import Casts
from .rows import Row


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
        wide_kernel_flops: Those of the matmuls in kernels that keep float32, as far as a kernel
            shows them. They are no part of the others.
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
        declared_residual_nbytes: What the same arrays would take in float32, without the copies
            that casts make: what the program keeps as it is written. None as above, and where an
            option asks to keep less.
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
            >>> explain(half_and_half, jnp.ones((8, 8)), policy=BF16).totals.low_share
            0.5
        """
        flops = self.contraction_flops
        return self.low_contraction_flops / flops if flops else 1.0


@dataclasses.dataclass(frozen=True)
class Share:
    """What one dtype takes part in.

    Args:
        flops: The FLOPs of the equations whose widest float operand has it; where no operand is a
            float, whose first result has it.
        nbytes: The bytes of operands and results in it. What has an inside does not count: its
            operands are read there.

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
    """Returns the share of each dtype, the most bytes first.

    Args:
        rows: The rows of a report, or some of them.
    """
    flops: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for row in rows:
        flops[dtype_of(row)] += row.flops  # 0 where the rows inside have them
        nbytes.update(nbytes_by_dtype(row))
    names = sorted(flops.keys() | nbytes.keys(), key=lambda name: (-nbytes[name], name))
    return {name: Share(flops[name], nbytes[name]) for name in names if flops[name] + nbytes[name]}


def nbytes_by_dtype(row: Row) -> dict[str, int]:
    """Returns the bytes of a row's operands and results in each dtype, over all its runs.

    Args:
        row: A row. One with an inside has none: its operands are read there.
    """
    nbytes: Counter[str] = Counter()
    if not row.inner:
        shapes = (*row.operand_shapes, *row.result_shapes)
        for name, shape in zip((*row.operands, *row.results), shapes, strict=True):
            nbytes[name] += row.times * assumed_size(math.prod(shape)) * item_size(name)
    return nbytes


def contraction_flops(rows: Iterable[Row]) -> tuple[int, int, int]:
    """Returns the FLOPs of matmuls and convolutions: all, those that are lowered, those in 8 bits.

    Args:
        rows: The rows of a report.
    """
    found = [row for row in rows if row.primitive in CONTRACTIONS]
    # Only the two factors count: what follows them in a ragged dot are the sizes of its groups.
    low = [row for row in found if all(is_low(name) for name in row.operands[:2])]
    low8 = [row for row in low if row.operands[0] == E4M3.name]
    total, total_low, total_low8 = (sum(row.flops for row in rows) for rows in (found, low, low8))
    return total, total_low, total_low8


def guarded(rows: Iterable[Row]) -> list[Row]:
    """Returns the matmuls and convolutions that a guard keeps in float32, the largest first.

    Args:
        rows: The rows of a report.
    """
    found = [r for r in rows if r.primitive in CONTRACTIONS and is_guard(ReasonCode(r.reason))]
    return sorted(found, key=lambda row: -row.flops)


def is_low(name: str) -> bool:
    """True for the names of float dtypes of fewer than 32 bits."""
    return is_float(name) and item_size(name) < 4


def dtype_of(row: Row) -> str:
    """Returns the dtype that a row computes in."""
    # A matmul of bfloat16 and float32 runs in float32, and so does all that has a float32 operand.
    floats = [name for name in row.operands if is_float(name)]
    return max(floats, key=item_size) if floats else (*row.results, "")[0]


def is_float(name: str) -> bool:
    """True for the names of real and complex floating point dtypes."""
    return "float" in name or "complex" in name


@functools.cache
def item_size(name: str) -> int:
    """Returns the bytes of one element, 0 for what is no number, such as a random key."""
    try:
        return jnp.dtype(name).itemsize
    except TypeError:
        return 0
