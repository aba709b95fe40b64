"""Matmuls of bfloat16 on CPUs, in the one form that always gets XLA's fast kernels.

XLA:CPU hands a product to YNNPACK if the left operand's contracted dimension is its last one. The
gradient of a weight is another form, and XLA makes others itself when it merges a transpose into a
product. With a bfloat16 result such a product runs in a naive loop that adds up in bfloat16 (30
times slower than float32, error 0.019 where 0.0017 is right, JAX 0.12); with a float32 result it
aborts ("Unsupported element type for DotThunk::Execute", JAX 0.10 to 0.12). So an operand in
another layout is transposed first, and barriers keep XLA from merging transposes into the product.
`tests/rewrite/test_cpu_forms.py` holds the digits of each form, `benchmarks/cpu.py` times models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from ..compat import Jaxpr, JaxprEqn, aval_of

# YNNPACK refuses vectors. A second row of zeros costs nothing, and reads the matrix in 16 bits
# where XLA would make a float32 copy of it: 0.20 ms for 0.57 ms, 512 x 2048.
_ROWS = 2


def product(
    lhs: Any, rhs: Any, dimension_numbers: Any, dtype: Any, *, exchanged: bool = False
) -> Any:
    """Multiplies two bfloat16 arrays in the form of the fast kernels.

    Args:
        lhs: The left operand.
        rhs: The right operand.
        dimension_numbers: Those of `lax.dot_general`.
        dtype: The dtype of the result: float32, or bfloat16 if the backend has such a kernel.
        exchanged: Whether the consumer moves the dimensions of ``rhs`` before those of ``lhs``.

    Returns:
        The product, in the layout of `lax.dot_general`, of dtype ``dtype``.
    """
    summed, batch = dimension_numbers
    summed = tuple(zip(*sorted(zip(*summed, strict=True)), strict=True))
    left, right = _Side.of(lhs, summed[0], batch[0]), _Side.of(rhs, summed[1], batch[1])
    # Either operand can be the left one. The cost is the copied elements, the result included.
    moved = left.rows.size * right.rows.size
    direct = left.copied_left + right.copied_right + moved * exchanged
    crossed = right.copied_left + left.copied_right + moved * (not exchanged)
    if crossed >= direct:
        return _multiplied(left, right, dtype)
    out = _multiplied(right, left, dtype)
    first, second = len(batch[0]), len(batch[0]) + len(right.rows.dims)
    return lax.transpose(out, (*range(first), *range(second, out.ndim), *range(first, second)))


def _multiplied(left: _Side, right: _Side, dtype: Any) -> Any:
    # The right operand may have its summed dimension first, or last.
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
        out = out[..., :rows, :columns]  # The row of padding is sliced off.
    shape = (*left.batch.lengths, *left.rows.lengths, *right.rows.lengths)
    return lax.reshape(lax.optimization_barrier(out), shape)


class _Group(NamedTuple):
    """Dimensions of an array that the product sees as one."""

    dims: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.lengths)


class _Side(NamedTuple):
    """An operand, and which of its dimensions are batches, summed, or neither: its rows."""

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
        """How many elements are copied to make it the right operand, in either layout."""
        return 0 if self.stands(self.batch, self.summed, self.rows) else self.copied_left

    def arranged(self, *groups: _Group) -> Any:
        """Returns the array with one dimension for each group.

        Behind the barrier it has a dimension more. Otherwise XLA passes the order in which the
        program made the array on to the product, which then is of a refused form again: 30 ms
        where 6 are right for the transpose of a weight.
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
    """Returns a ``dot_general`` as `product`, None without a sum or if dimensions cannot be moved.

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
    """Returns whether a ``dot_general`` sums nothing.

    Args:
        lhs: Its left operand.
        params: Its parameters.
    """
    (summed, _), _ = params["dimension_numbers"]
    return math.prod(lhs.shape[i] for i in summed) == 1


def can_be_arranged(xs: Sequence[Any]) -> bool:
    """Returns whether the dimensions of the operands may be moved and merged.

    They may not if the type has a sharding, which JAX cannot always infer for a merged dimension,
    or a symbolic size.
    """
    specs = [getattr(getattr(jax.typeof(x), "sharding", None), "spec", ()) for x in xs]
    is_split = any(axis is not None for spec in specs for axis in spec)
    return not is_split and all(isinstance(n, int) and n > 0 for x in xs for n in x.shape)


def is_exchanged(jaxpr: Jaxpr, product: JaxprEqn) -> bool:
    """Returns whether the only consumer of a product is a transpose that swaps its operands.

    So JAX writes the gradient of a weight: ``(g.T @ x).T``.

    Args:
        jaxpr: A jaxpr of movements and one contraction.
        product: The contraction.
    """
    consumers = [e for e in jaxpr.eqns if product.outvars[0] in e.invars]
    if product.primitive.name != "dot_general" or len(consumers) != 1:
        return False
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    ndim, rows = (aval_of(v).ndim for v in (product.outvars[0], product.invars[0]))
    rows -= len(summed)
    exchanged = (*range(len(batch)), *range(rows, ndim), *range(len(batch), rows))
    (consumer,) = consumers
    return consumer.primitive.name == "transpose" and consumer.params["permutation"] == exchanged
