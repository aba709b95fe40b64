"""How FLOPs and bytes of rows divide among dtypes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from ...interpreters.after.guarded_products import is_guard
from ...interpreters.compat import assumed_size
from ...interpreters.plan.reasons import ReasonCode
from ...policies import CONTRACTIONS, E2M1, E4M3
from .rows import Row


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


def contraction_flops(rows: Iterable[Row], wide: np.dtype) -> tuple[int, int, int]:
    """Returns the FLOPs of matmuls and convolutions: all, those that are lowered, those in 8 bits.

    Args:
        rows: The rows of a report.
        wide: The wide dtype of the policy.
    """
    found = [row for row in rows if row.primitive in CONTRACTIONS]
    # Only the two factors count: what follows them in a ragged dot are the sizes of its groups.
    low = [row for row in found if all(is_low(name, wide) for name in row.operands[:2])]
    low8 = [row for row in low if row.operands[0] in (E2M1.name, E4M3.name)]
    total, total_low, total_low8 = (sum(row.flops for row in rows) for rows in (found, low, low8))
    return total, total_low, total_low8


def guarded(rows: Iterable[Row]) -> list[Row]:
    """Returns the matmuls and convolutions that a guard keeps in float32, the largest first.

    Args:
        rows: The rows of a report.
    """
    found = [r for r in rows if r.primitive in CONTRACTIONS and is_guard(ReasonCode(r.reason))]
    return sorted(found, key=lambda row: -row.flops)


def is_low(name: str, wide: np.dtype) -> bool:
    """True for the names of float dtypes that are narrower than the wide one of the policy."""
    return is_float(name) and item_size(name) < wide.itemsize


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
