"""Products of arrays in which 32, or 16, elements along the contracted dimension share a scale."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..policies import E2M1, FLOAT32
from .dimensions import DimensionNumbers, free
from .scale import split_scales, unscaled


def block_scaled_dot(
    lhs: tuple[Any, Any],
    rhs: tuple[Any, Any],
    numbers: DimensionNumbers,
    *,
    out: np.dtype,
    widen: bool,
    emulate: bool,
) -> Any:
    """Multiplies two arrays in a microscaling format, or in NVFP4.

    Args:
        lhs: The values of the left factor, and their inverse scales, along the last dimension that
            the product sums over. Or an array and None, for a derivative in forward mode: the other
            factor, whose blocks lie across, is then multiplied by its scales before.
        rhs: Those of the right factor.
        numbers: The dimension numbers.
        out: The dtype of the result.
        widen: The values are multiplied by their scales in float32, which gives the same products.
        emulate: So they are, behind a barrier.
    """
    if emulate:
        # XLA for GPUs removes a cast to 8 bits that is followed by one back.
        lhs, rhs = lax.optimization_barrier((lhs, rhs))
    if not (widen or emulate or lhs[1] is None or rhs[1] is None):
        return _scaled_matmul(lhs, rhs, numbers, out)
    wide = FLOAT32 if widen or emulate else out
    arrays = [x if scale is None else unscaled(x, scale) for x, scale in (lhs, rhs)]
    factors = [lax.convert_element_type(x, wide) for x in arrays]
    product = lax.dot_general(
        factors[0],
        factors[1],
        numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=FLOAT32,
    )
    return lax.convert_element_type(product, out)


def _scaled_matmul(
    lhs: tuple[Any, Any], rhs: tuple[Any, Any], numbers: DimensionNumbers, out: np.dtype
) -> Any:
    """Multiplies by the product of JAX, which cuDNN has for GPUs from B200 on."""
    shapes, arrays = [], []
    for i, pair in enumerate((lhs, rhs)):
        rank = pair[0].ndim
        parts = numbers[1][i], free(numbers, rank, i), numbers[0][i]
        order = [d for part in parts for d in part]
        shapes.append([[pair[0].shape[d] for d in part] for part in parts])
        sizes = [math.prod(sizes) for sizes in shapes[i]][:2]
        arrays.append([x.transpose(order).reshape(*sizes, -1) for x in pair])
    (x, of_x), (w, of_w) = arrays
    # What is summed may be beyond float16, 448 * 448 * K.
    preferred = FLOAT32 if out == np.float16 else out
    whole = None
    if x.dtype == E2M1:
        (of_x, whole_x), (of_w, whole_w) = map(split_scales, (of_x, of_w))
        whole = lax.convert_element_type(whole_x * whole_w, preferred)
    else:
        of_x, of_w = (s.astype(jnp.float8_e8m0fnu) for s in (of_x, of_w))
    product = jax.nn.scaled_matmul(x, w, of_x, of_w, preferred_element_type=preferred)
    if whole is not None:
        product = product * whole  # a power of two, which rounds nothing in bfloat16
    batch, left, right = shapes[0][0], shapes[0][1], shapes[1][1]
    return lax.convert_element_type(product.reshape(*batch, *left, *right), out)
