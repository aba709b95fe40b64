"""Gathers that pick single elements: `jnp.take_along_axis`, `x[rows, labels]`, `x[label]`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .cached_bind import bind_cached


def picks(eqn: Any) -> bool:
    """Returns whether an equation picks single floats, at most half as many as there are.

    Args:
        eqn: Any equation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> chosen = jax.make_jaxpr(lambda x, i: x[jnp.arange(4), i])
        >>> eqns = chosen(jnp.ones((4, 8)), jnp.zeros(4, int)).eqns
        >>> [picks(eqn) for eqn in eqns if eqn.primitive.name == "gather"]
        [True]
    """
    if eqn.primitive.name != "gather" or eqn.params["dimension_numbers"].offset_dims:
        return False
    operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return False
    lengths = (*operand.shape, *result.shape)
    # Of symbolic sizes nobody knows which is larger.
    return all(isinstance(n, int) for n in lengths) and 2 * result.size <= operand.size


def picked_elements(eqn: Any, array: Any, indices: Any) -> Any:
    """Picks what an array would give in the place of the operand of a gather.

    Args:
        eqn: An equation that picks single elements.
        array: Of the shape of the operand, or of length 1 along some dimensions, as an array that
            is broadcast to that shape.
        indices: The indices of the equation.

    Returns:
        An array of the shape of the result; None where the shapes do not fit.
    """
    whole = eqn.invars[0].aval.shape
    if array.shape == whole:
        return bind_cached(eqn.primitive, [array, indices], eqn.params)
    if len(array.shape) != len(whole):
        return None
    if any(own not in (1, length) for own, length in zip(array.shape, whole, strict=True)):
        return None
    # Along a dimension of length 1 there is one element for all indices.
    kept = [d for d, length in enumerate(whole) if array.shape[d] == length]
    place = {d: k for k, d in enumerate(kept)}
    array = lax.reshape(array, [whole[d] for d in kept])
    numbers = eqn.params["dimension_numbers"]
    collapsed = [d for d in numbers.collapsed_slice_dims if d in place]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    batch = [(place[d], k) for d, k in pairs if d in place]
    columns = [k for k, d in enumerate(numbers.start_index_map) if d in place]
    if not columns:
        order = sorted(batch, key=lambda pair: pair[1])
        array = lax.transpose(array, [d for d, _ in order])
        return lax.broadcast_in_dim(array, eqn.outvars[0].aval.shape, [k for _, k in order])
    return lax.gather(
        array,
        indices[..., jnp.array(columns)],
        lax.GatherDimensionNumbers(
            offset_dims=(),
            collapsed_slice_dims=tuple(place[d] for d in collapsed),
            start_index_map=tuple(place[numbers.start_index_map[k]] for k in columns),
            operand_batching_dims=tuple(d for d, _ in batch),
            start_indices_batching_dims=tuple(k for _, k in batch),
        ),
        slice_sizes=(1,) * array.ndim,
        mode=eqn.params["mode"],
        fill_value=eqn.params["fill_value"],
    )


def with_all_dimensions(eqn: Any, array: Any) -> Any:
    """Returns the operand of a broadcast with the dimensions of its result, new ones of length 1.

    Args:
        eqn: A ``broadcast_in_dim``.
        array: Its operand.
    """
    lengths = dict(zip(eqn.params["broadcast_dimensions"], array.shape, strict=True))
    return lax.reshape(array, [lengths.get(d, 1) for d in range(eqn.outvars[0].aval.ndim)])
