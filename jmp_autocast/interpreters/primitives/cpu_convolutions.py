"""Convolutions of bfloat16 on CPUs that can be computed as one product or a few products.

XLA:CPU computes a bfloat16 convolution in float32. A convolution reads each element once if its
windows are 1 x 1 or as large as their stride (the patches of a ViT); so do the gradients of its
kernel and image. Each of these is one product in the form of `cpu_products`, without a copy of the
operands. The gradient of any other kernel is one product for each position in the kernel: 1.8 to
3.6 times as fast as float32 for 3 x 3 (JAX 0.12, `benchmarks/cpu.py --forms`). Forward convolutions
with overlapping windows stay in XLA's float32: gathering the patches took as long as the products
saved.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .cpu_products import can_be_arranged, product

# The largest number of products in place of one convolution; XLA takes long to compile more.
_MOST_POSITIONS = 128
# A product of fewer columns does not fill the CPU's matrix units, so several positions share a
# product: the gradient of a 7 x 7 kernel of 3 features takes 4.6 ms instead of 8.6 (112 x 112,
# stride 2).
_COLUMNS = 64

# The parameters of `conv_general_dilated` that have an entry for each spatial dimension.
_OF_AXES = ("padding", "lhs_dilation", "window_strides", "rhs_dilation")


class _Axis(NamedTuple):
    """A spatial dimension of the padded image, split in two: its index is ``step * i + j``.

    In a forward convolution, ``i`` is the position in the result and ``j`` the position in the
    window. In the gradient of a kernel, whose window is as large as the image, ``i`` is the
    position in the window and ``j`` the position in the result. ``outer`` and ``inner`` are the
    lengths of ``i`` and ``j``.
    """

    outer: int
    step: int
    inner: int


def convolution(lhs: Any, rhs: Any, params: dict[str, Any], dtype: Any) -> Any:
    """Convolves two bfloat16 arrays as one product.

    Args:
        lhs: The images.
        rhs: The kernel.
        params: The parameters of the ``conv_general_dilated``.
        dtype: The dtype of the result: float32 or bfloat16.

    Returns:
        The convolution, of dtype ``dtype``. None if it has groups of features, or if its windows
        overlap and it has more results per image than a window has elements.
    """
    if params["feature_group_count"] > 1 or not can_be_arranged((lhs, rhs)):
        return None
    if params["batch_group_count"] > 1:
        return _by_position(lhs, rhs, params, dtype)
    by_window = (axes := _axes(lhs, rhs, params, True)) is not None
    if axes is None and (axes := _axes(lhs, rhs, params, False)) is None:
        return _by_position(lhs, rhs, params, dtype)
    numbers = params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    _, in_feature, *window_dims = numbers.rhs_spec
    # Each spatial dimension is split in two, which shifts the dimensions after it.
    widths, shape, limits = [(0, 0, 0)] * lhs.ndim, [], []
    outer_dims, inner_dims, moved = {}, {}, {}
    for i, n in enumerate(lhs.shape):
        if i not in spatial:
            moved[i] = len(shape)
            shape, limits = [*shape, n], [*limits, n]
            continue
        axis = axes[spatial.index(i)]
        (low, _), by = (params[k][spatial.index(i)] for k in ("padding", "lhs_dilation"))
        dilated = n + (n - 1) * (by - 1)
        widths[i] = (low, axis.outer * axis.step - low - dilated, by - 1)
        outer_dims[i], inner_dims[i] = len(shape), len(shape) + 1
        shape, limits = [*shape, axis.outer, axis.step], [*limits, axis.outer, axis.inner]
    x = lax.pad(lhs, lhs.dtype.type(0), widths).reshape(shape)
    x = lax.slice(x, [0] * len(shape), limits)
    in_window, in_result = (inner_dims, outer_dims) if by_window else (outer_dims, inner_dims)
    summed = ((*(in_window[i] for i in spatial), moved[feature]), (*window_dims, in_feature))
    out = product(x, rhs, (summed, ((), ())), dtype)
    # The rows of the product are the dimensions of the images that are not summed, in their order.
    out_batch, out_feature, *out_spatial = numbers.out_spec
    places = {moved[batch]: out_batch}
    places |= {in_result[i]: place for i, place in zip(spatial, out_spatial, strict=True)}
    return lax.transpose(out, np.argsort([*(places[i] for i in sorted(places)), out_feature]))


def _by_position(lhs: Any, rhs: Any, params: dict[str, Any], dtype: Any) -> Any:
    """Computes a convolution with few spatial results as one product for each of them.

    The gradient of a kernel is such a convolution: its window is as large as the image, and its
    spatial results are the positions in the kernel. The groups of a kernel become a batch dimension
    of the products: 8 groups take 3.4 ms instead of 426 in XLA's float32 (3 x 3, 8 x 16 x 16 x 256,
    JAX 0.12).
    """
    numbers = params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    out_feature, in_feature, *window_dims = numbers.rhs_spec
    padding, holes, strides, dilation = (params[name] for name in _OF_AXES)
    window = [rhs.shape[i] for i in window_dims]
    spread = [(n - 1) * by + 1 for n, by in zip(window, dilation, strict=True)]
    widths = [(*pad, by - 1) for pad, by in zip(padding, holes, strict=True)]
    # The images of each group become the last dimension. The products do not sum over it, but over
    # features and positions in the window.
    groups = params["batch_group_count"]
    x = lax.transpose(lhs, (batch, feature, *spatial))
    x = lax.reshape(x, (groups, x.shape[0] // groups, *x.shape[1:]))
    x = lax.transpose(x, (0, *range(2, x.ndim), 1))
    x = lax.pad(x, x.dtype.type(0), [(0, 0, 0)] * 2 + widths + [(0, 0, 0)])
    lengths = zip(x.shape[2:-1], spread, strides, strict=True)
    counts = [(n - part) // by + 1 for n, part, by in lengths]
    positions = list(itertools.product(*map(range, counts)))
    if not 0 < len(positions) <= min(_MOST_POSITIONS, math.prod(window) - 1):
        return None
    features, images = x.shape[1], x.shape[-1]
    kernel = lax.transpose(rhs, (out_feature, in_feature, *window_dims))
    # With the barrier, the kernel is transposed once for all products.
    kernel = kernel.reshape(1, groups, kernel.shape[0] // groups, -1)
    kernel = lax.optimization_barrier(kernel)[0]

    def read(position: tuple[int, ...]) -> Any:
        start = [by * k for by, k in zip(strides, position, strict=True)]
        limit = [first + part for first, part in zip(start, spread, strict=True)]
        limits = groups, features, *limit, images
        part = lax.slice(x, (0, 0, *start, 0), limits, (1, 1, *dilation, 1))
        return part.reshape(groups, -1, images)

    at_once = max(1, _COLUMNS // images)
    parts = [
        lax.concatenate([read(p) for p in positions[i : i + at_once]], 2)
        for i in range(0, len(positions), at_once)
    ]
    products = [product(kernel, part, (((2,), (1,)), ((0,), (0,))), dtype) for part in parts]
    out = lax.concatenate(products, 2).reshape(-1, *counts, images)
    places = [numbers.out_spec[i] for i in (1, *range(2, out.ndim), 0)]
    return lax.transpose(out, np.argsort(places))


def _axes(lhs: Any, rhs: Any, params: dict[str, Any], by_window: bool) -> list[_Axis] | None:
    """Returns how windows divide the spatial dimensions; None if windows overlap."""
    numbers = params["dimension_numbers"]
    axes = []
    for k, (i, w) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        (low, high), by, stride, dilation = (params[name][k] for name in _OF_AXES)
        window, n = rhs.shape[w], lhs.shape[i]
        length = low + high + n + (n - 1) * (by - 1)
        result = (length - (window - 1) * dilation - 1) // stride + 1
        if result < 1:
            return None
        outer, step, inner, inner_step = (
            (result, stride, window, dilation) if by_window else (window, dilation, result, stride)
        )
        if step < inner or (inner_step != 1 and inner != 1):
            return None
        axes.append(_Axis(outer, step, inner))
    return axes
