"""Matmuls of bfloat16 on CPUs, in the form that always gets XLA's fast kernels.

XLA:CPU runs a bfloat16 product in YNNPACK only if the contracted dimension of the left operand is
its last one. The gradient of a weight is not of this form, and XLA also destroys the form when it
merges a transpose into a product. With a bfloat16 result, any other form runs in a naive loop that
accumulates in bfloat16 (30 times slower than float32, error 0.019 where 0.0017 is right, JAX 0.12).
With a float32 result, XLA aborts ("Unsupported element type for DotThunk::Execute", JAX 0.10 to
0.12). So an operand in another layout is transposed first, and barriers keep XLA from merging
transposes into the product. `tests/rewrite/test_cpu_forms.py` holds the digits of each form,
`benchmarks/cpu.py` times models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from ..compat import Jaxpr, JaxprEqn, aval_of

# YNNPACK refuses vectors, so a vector gets a second row, of zeros. Without it, XLA would copy the
# matrix to float32: 0.57 ms instead of 0.20 ms for 512 x 2048.
_ROWS = 2


def product(
    lhs: Any, rhs: Any, dimension_numbers: Any, dtype: Any, *, exchanged: bool = False
) -> Any:
    """Multiplies two bfloat16 arrays in the form that the fast kernels need.

    Args:
        lhs: The left operand.
        rhs: The right operand.
        dimension_numbers: The dimension numbers of `lax.dot_general`.
        dtype: The dtype of the result: float32, or bfloat16 if the CPU has a kernel for it.
        exchanged: Whether the consumer moves the dimensions of ``rhs`` before those of ``lhs``.

    Returns:
        The product, in the layout of `lax.dot_general`, of dtype ``dtype``.
    """
    summed, batch = dimension_numbers
    summed = tuple(zip(*sorted(zip(*summed, strict=True)), strict=True))
    left, right = _Side.of(lhs, summed[0], batch[0]), _Side.of(rhs, summed[1], batch[1])
    # Either operand can be the left one. The cost is the number of copied elements, with those of
    # the result.
    moved = left.rows.size * right.rows.size
    direct = left.copied_left + right.copied_right + moved * exchanged
    crossed = right.copied_left + left.copied_right + moved * (not exchanged)
    if crossed >= direct:
        return _multiplied(left, right, dtype)
    out = _multiplied(right, left, dtype)
    first, second = len(batch[0]), len(batch[0]) + len(right.rows.dims)
    return lax.transpose(out, (*range(first), *range(second, out.ndim), *range(first, second)))


def _multiplied(left: _Side, right: _Side, dtype: Any) -> Any:
    # The summed dimension of the right operand may be its first or its last.
    by_rows = right.stands(right.batch, right.rows, right.summed)
    groups = (right.rows, right.summed) if by_rows else (right.summed, right.rows)
    batches = [(side.batch,) if side.batch.dims else () for side in (left, right)]
    a = left.arranged(*batches[0], left.rows, left.summed)
    b = right.arranged(*batches[1], *groups)
    rows, columns = left.rows.size, right.rows.size
    last, batch = a.ndim - 1, tuple(range(a.ndim - 2))
    if rows == 1 < columns:
        a = _padded(a, last - 1)
    if columns == 1 < rows:
        b = _padded(b, last - 1 if by_rows else last)
    numbers = (((last,), (last if by_rows else last - 1,)), (batch, batch))
    out = lax.dot_general(a, b, numbers, preferred_element_type=dtype)
    if out.shape[-2:] != (rows, columns):
        out = out[..., :rows, :columns]  # removes the padding
    shape = (*left.batch.lengths, *left.rows.lengths, *right.rows.lengths)
    return lax.reshape(lax.optimization_barrier(out), shape)


class _Group(NamedTuple):
    """Dimensions of an array that the product treats as one dimension."""

    dims: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.lengths)


class _Side(NamedTuple):
    """An operand, with its dimensions in three groups: batch, summed, and all others, the rows."""

    array: Any
    batch: _Group
    rows: _Group
    summed: _Group

    @classmethod
    def of(cls, array: Any, summed: Sequence[int], batch: Sequence[int]) -> _Side:
        rows = [i for i in range(array.ndim) if i not in summed and i not in batch]
        groups = (tuple(g) for g in (batch, rows, summed))
        return cls(array, *(_Group(g, tuple(array.shape[i] for i in g)) for g in groups))

    def stands(self, *groups: _Group) -> bool:
        order = [i for g in groups for i in g.dims]
        return order == sorted(order)

    @property
    def copied_left(self) -> int:
        """The number of elements to copy if this is the left operand."""
        return 0 if self.stands(self.batch, self.rows, self.summed) else self.array.size

    @property
    def copied_right(self) -> int:
        """The number of elements to copy if this is the right operand, in its cheaper layout."""
        return 0 if self.stands(self.batch, self.summed, self.rows) else self.copied_left

    def arranged(self, *groups: _Group) -> Any:
        """Returns the array with one dimension for each group.

        The barrier is around an array with one more dimension. Otherwise, XLA would give the
        product the memory layout in which the program computes the array, and YNNPACK would refuse
        that layout: a product with a transposed weight takes 30 ms instead of 6.
        """
        order = [i for g in groups for i in g.dims]
        sizes = [g.size for g in groups]
        moved = self.array if self.stands(*groups) else lax.transpose(self.array, order)
        return lax.reshape(lax.optimization_barrier(lax.reshape(moved, (1, *sizes))), sizes)


def _padded(x: Any, dimension: int) -> Any:
    widths = [(0, _ROWS - 1 if i == dimension else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, x.dtype.type(0), widths)


def matmul(
    lhs: Any, rhs: Any, params: dict[str, Any], dtype: Any, *, exchanged: bool = False
) -> Any:
    """Computes a ``dot_general`` by `product`; None if it sums nothing or cannot be arranged.

    Args:
        lhs: The left operand.
        rhs: The right operand.
        params: The parameters of the ``dot_general``.
        dtype: As for `product`.
        exchanged: As for `product`.
    """
    if not can_be_arranged((lhs, rhs)) or is_outer(lhs, params):
        return None
    return product(lhs, rhs, params["dimension_numbers"], dtype, exchanged=exchanged)


def is_outer(lhs: Any, params: dict[str, Any]) -> bool:
    """Returns whether a ``dot_general`` sums over a single element.

    Args:
        lhs: Its left operand.
        params: Its parameters.
    """
    (summed, _), _ = params["dimension_numbers"]
    return math.prod(lhs.shape[i] for i in summed) == 1


def can_be_arranged(xs: Sequence[Any]) -> bool:
    """Returns whether the dimensions of operands may be transposed and merged.

    They may not if a type has a sharding, which JAX cannot always infer for a merged dimension, or
    a symbolic size.
    """
    specs = [getattr(getattr(jax.typeof(x), "sharding", None), "spec", ()) for x in xs]
    is_split = any(axis is not None for spec in specs for axis in spec)
    return not is_split and all(isinstance(n, int) and n > 0 for x in xs for n in x.shape)


def is_exchanged(jaxpr: Jaxpr, product: JaxprEqn) -> bool:
    """Returns whether a product's only consumer is a transpose that moves ``rhs``'s rows first."""
    consumers = [e for e in jaxpr.eqns if product.outvars[0] in e.invars]
    if product.primitive.name != "dot_general" or len(consumers) != 1:
        return False
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    ndim, rows = (aval_of(v).ndim for v in (product.outvars[0], product.invars[0]))
    rows -= len(summed)
    exchanged = (*range(len(batch)), *range(rows, ndim), *range(len(batch), rows))
    (consumer,) = consumers
    return consumer.primitive.name == "transpose" and consumer.params["permutation"] == exchanged
