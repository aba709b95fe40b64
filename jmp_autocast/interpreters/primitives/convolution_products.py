"""How many products a convolution sums. Those with padding, and with holes, are none.

XLA's cost analysis counts them so. Windows over padding would be 20 % of a ResNet's training step
on images of 16 x 16.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..compat import JaxprEqn, aval_of


def convolution_products(eqn: JaxprEqn) -> Any:
    """Returns how many products of two elements a ``conv_general_dilated`` sums.

    Args:
        eqn: The equation. With symbolic sizes, windows are counted as a whole.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    avals = (*eqn.invars[:2], eqn.outvars[0])
    lhs, rhs, out = (
        [aval_of(v).shape[i] for i in spec] for v, spec in zip(avals, numbers, strict=True)
    )
    # After batch and features of the image, and features out and in of the kernel.
    window = zip(
        lhs[2:],
        rhs[2:],
        out[2:],
        params["window_strides"],
        (low for low, _ in params["padding"]),
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    positions = math.prod(
        pairs_that_meet(*each) if all(isinstance(n, int) for n in each[:3]) else each[1] * each[2]
        for each in window
    )
    return positions * out[0] * out[1] * rhs[1]


@functools.lru_cache(maxsize=4096)
def pairs_that_meet(
    size: int, kernel: int, result: int, stride: int, pad: int, dilation: int, kernel_dilation: int
) -> int:
    """Returns how many pairs of a result's and a kernel's position meet an element of the image.

    Args:
        size: Elements of the image along a dimension.
        kernel: Those of the kernel.
        result: Those of the result.
        stride: The stride of the window.
        pad: The padding before the first element; negative where elements are cut off.
        dilation: That of the image: 2 for a hole between any two elements.
        kernel_dilation: That of the kernel.

    Example:
        >>> pairs_that_meet(8, 3, 8, 1, 1, 1, 1)  # the first and the last window meet two
        22
    """
    starts = np.arange(kernel)[:, None] * kernel_dilation - pad
    at = starts + np.arange(result) * stride
    return int(np.sum((at % dilation == 0) & (at >= 0) & (at < size * dilation)))
