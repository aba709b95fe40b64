"""Gathers that pick single elements: `jnp.take_along_axis`, `x[rows, labels]`, `x[label]`.

The primitive `pick` is such a gather of one element per row, with a transpose that does not
scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compat import JaxprEqn, aval_of, registration, varying_axes
from .cached_bind import bind_cached
from .traits import BACKWARD

_ELEMENTWISE = frozenset(name for name, words in BACKWARD.items() if "elementwise" in words)


def picks(eqn: JaxprEqn) -> bool:
    """Returns whether an equation gathers single floats, at most half as many as its operand holds.

    Args:
        eqn: Any equation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> chosen = jax.make_jaxpr(lambda x, i: x[jnp.arange(4), i])
        >>> eqns = chosen(jnp.ones((4, 8)), jnp.zeros(4, int)).eqns
        >>> [picks(eqn) for eqn in eqns if eqn.primitive.name == "gather"]
        [True]
    """
    if eqn.primitive.name != "gather":
        return False
    operand, result = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    # `jnp.take_along_axis` takes slices of dimensions of length 1, which are single elements, too.
    sizes = (*eqn.params["slice_sizes"], *[operand.shape[d] for d in _sliced(eqn)])
    is_single = all(n == 1 for n in sizes)
    if not is_single or not jnp.issubdtype(operand.dtype, jnp.floating):
        return False
    lengths = (*operand.shape, *result.shape)
    # Symbolic sizes cannot be compared.
    return all(isinstance(n, int) for n in lengths) and 2 * result.size <= operand.size


def _sliced(eqn: JaxprEqn) -> list[int]:
    """Returns the dimensions of a gather's operand that its indices do not select along."""
    numbers = eqn.params["dimension_numbers"]
    indexed = {*numbers.start_index_map, *numbers.operand_batching_dims}
    return [d for d in range(aval_of(eqn.invars[0]).ndim) if d not in indexed]


def fills_with_number(eqn: JaxprEqn) -> bool:
    """Returns whether a gather returns a number, and not NaN, for an index out of range."""
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    return mode == lax.GatherScatterMode.FILL_OR_DROP and fill is not None and not np.isnan(fill)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Returns whether each element of a result depends only on the same element of each operand."""
    return eqn.primitive.name in _ELEMENTWISE


def picked_elements(eqn: JaxprEqn, array: Any, indices: Any) -> Any:
    """Applies a gather of single elements to another array.

    Args:
        eqn: An equation that picks single elements.
        array: An array of the operand's shape, or one of the same rank that broadcasts to this
            shape.
        indices: The indices of the equation.

    Returns:
        An array of the shape of the result.
    """
    whole = aval_of(eqn.invars[0]).shape
    if array.shape == whole:
        return bind_cached(eqn.primitive, [array, indices], eqn.params)
    # Along a dimension of length 1, all indices read the same element.
    sliced = _sliced(eqn)
    kept = [d for d, n in enumerate(whole) if array.shape[d] == n and d not in sliced]
    place = {d: k for k, d in enumerate(kept)}
    array = lax.reshape(array, [whole[d] for d in kept])
    numbers = eqn.params["dimension_numbers"]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    batch = [(place[d], k) for d, k in pairs if d in place]
    columns = [k for k, d in enumerate(numbers.start_index_map) if d in place]
    if not columns:
        order = sorted(batch, key=lambda pair: pair[1])
        array = lax.transpose(array, [d for d, _ in order])
        small = lax.broadcast_in_dim(array, indices.shape[:-1], [k for _, k in order])
        return lax.reshape(small, aval_of(eqn.outvars[0]).shape)
    if len(columns) < indices.shape[-1]:
        taken = [lax.slice_in_dim(indices, k, k + 1, axis=-1) for k in columns]
        indices = lax.concatenate(taken, indices.ndim - 1)
    indexed = tuple(place[numbers.start_index_map[k]] for k in columns)
    of_array, of_indices = zip(*batch, strict=True) if batch else ((), ())
    collapsed = tuple(sorted(indexed))
    dimensions = lax.GatherDimensionNumbers((), collapsed, indexed, of_array, of_indices)
    options = {name: eqn.params[name] for name in ("mode", "fill_value")}
    small = lax.gather(array, indices, dimensions, (1,) * array.ndim, **options)
    return lax.reshape(small, aval_of(eqn.outvars[0]).shape)


# --- one element of each row --------------------------------------------------------------------


def _is_picked(index: Any, shape: Sequence[int], axis: int) -> Any:
    # The positions are compared in at least 32 bits: in 8 bits, position 259 wraps to 3, and would
    # equal the label 3.
    if index.dtype.itemsize < 4:
        index = lax.convert_element_type(index, np.int32)
    return lax.broadcasted_iota(index.dtype, shape, axis) == index


def _gathered(x: Any, index: Any, *, axis: int, outside: float) -> Any:
    others = tuple(d for d in range(x.ndim) if d != axis)
    numbers = lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.gather(x, index[..., None], numbers, (1,) * x.ndim, mode=mode, fill_value=outside)


def _compared(x: Any, index: Any, *, axis: int, outside: float) -> Any:
    # TPUs use this form because XLA shards it better than a gather, which it would also compile to
    # comparisons. If rows and vocabulary are sharded over 16 chips, XLA shards this comparison by
    # rows, like the gradient. It would shard a gather by vocabulary, and then exchange 386 MB of
    # the gradient between chips (1.08 times the bytes on the wire).
    if outside != 0:
        is_inside = (index >= 0) & (index <= _last(index, x.shape[axis]))
        x = jnp.where(is_inside, x, np.array(outside, x.dtype))
        index = _clamped(index, x.shape[axis])
    return jnp.sum(x, axis, keepdims=True, where=_is_picked(index, x.shape, axis))


def _last(index: Any, length: int) -> np.ndarray:
    return np.array(min(length - 1, jnp.iinfo(index.dtype).max), index.dtype)


def _clamped(index: Any, length: int) -> Any:
    return lax.clamp(np.zeros((), index.dtype), index, _last(index, length))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, axis: int, outside: float
) -> tuple[Any, Any]:
    (x, index), tangent = primals, tangents[0]
    out = pick_p.bind(x, index, axis=axis, outside=outside)
    if registration.is_zero(tangent):
        return out, registration.zero_tangent(out)
    return out, pick_p.bind(tangent, index, axis=axis, outside=0.0)


def _transpose(cotangent: Any, x: Any, index: Any, *, axis: int, outside: float) -> list[Any]:
    if registration.is_zero(cotangent) or not registration.is_undefined_primal(x):
        return [None, None]
    is_picked = _is_picked(index, x.aval.shape, axis)
    return [jnp.where(is_picked, cotangent, jnp.zeros((), cotangent.dtype)), None]


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, axis: int, outside: float
) -> tuple[Any, int]:
    given = registration.all_at_front(operands, dims)
    return pick_p.bind(*given, axis=axis + 1, outside=outside), 0


pick_p: Any = registration.define_primitive(
    "pick",
    aval=lambda x, index, *, axis, outside: x.update(shape=index.shape),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
registration.lowers_by_platform(pick_p, default=_gathered, tpu=_compared)


def pick(x: Any, index: Any, axis: int, outside: float = 0.0) -> Any:
    """Picks one element of each row, with a transpose that compares positions instead of a scatter.

    XLA's compiler for GPUs stores the result of a scatter: for the labels of 8 x 1024 tokens, 1.65
    GB of zeros, which it writes and reads twice. It fuses a comparison into its consumer.

    Args:
        x: A float array of any shape.
        index: Integers, of the shape of ``x`` but with length 1 along the axis.
        axis: The axis of the rows.
        outside: The result for indices out of range, which have no gradient.

    Returns:
        An array of the shape of ``index``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> label = jnp.array([[2]])
        >>> jax.grad(lambda x: pick(x, label, 1).sum())(jnp.ones((1, 3))).tolist()
        [[0.0, 0.0, 1.0]]
    """
    return pick_p.bind(x, index, axis=axis, outside=outside)


def picked_by_rows(eqn: JaxprEqn, array: Any, indices: Any) -> Any:
    """Computes a gather of single elements, by `pick` if it gathers one element per row.

    Args:
        eqn: An equation that picks single elements.
        array: Its operand.
        indices: Its indices.
    """
    numbers, shape = eqn.params["dimension_numbers"], array.shape
    # `pick` needs an array of the operand's full shape. An array that is broadcast later, such as a
    # norm's deviation, may have only one element for all indices of a row.
    is_whole = shape == aval_of(eqn.invars[0]).shape
    if len(numbers.start_index_map) != 1 or not is_whole:
        return picked_elements(eqn, array, indices)
    (axis,) = numbers.start_index_map
    sliced = _sliced(eqn)
    others = tuple(d for d in range(len(shape)) if d != axis and d not in sliced)
    row = tuple(1 if d == axis else length for d, length in enumerate(shape))
    # `pick` needs indices whose batch dimensions are in the order of the rows. The indices may have
    # a dimension of length 1 for the axis.
    orders = (others, tuple(range(len(others))))
    is_single = indices.size == math.prod(row) and numbers.operand_batching_dims == others
    # In a `shard_map`, only JAX's own gather knows the mesh axes along which its result varies.
    is_mapped = any(map(varying_axes, (array, indices)))
    if not is_single or numbers.start_indices_batching_dims not in orders or is_mapped:
        return picked_elements(eqn, array, indices)
    index, mode, fill = lax.reshape(indices, row), eqn.params["mode"], eqn.params["fill_value"]
    if mode == lax.GatherScatterMode.CLIP:
        index = _clamped(index, shape[axis])
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    outside = np.nan if fill is None else float(fill)
    found = pick(array, index, axis, outside if fills else 0.0)
    return lax.reshape(found, aval_of(eqn.outvars[0]).shape)
