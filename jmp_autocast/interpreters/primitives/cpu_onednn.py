"""Convolutions of bfloat16 on CPUs as oneDNN takes them, where XLA is told to ask it.

With the option that `compiler_options` returns XLA hands a convolution of bfloat16 to oneDNN, about
3 times as fast as float32, if its result is bfloat16 and its image has no holes. The gradient of an
image is such a convolution with a flipped kernel, which XLA must not merge into another form. What
oneDNN is slow at stays float32: 8 groups took 480 ms for 7 (8 x 16 x 16 x 256, JAX 0.12).
`benchmarks/cpu.py --forms` times each form.
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax

# An image with holes is filled up with zeros, which costs as many operations more as it grows by.
# Filled up for a stride of 2 its gradient takes 3.4 ms for 4.5, for a stride of 4 18.6 for 13.3; a
# gradient of 3 features loses, too (9.6 ms for 6.3).
_MOST_GROWTH = 4
_LEAST_FEATURES = 16


def convolution_in_onednn(lhs: Any, rhs: Any, params: dict[str, Any]) -> Any:
    """Returns a bfloat16 convolution in the form that oneDNN takes.

    Args:
        lhs: The images, bfloat16.
        rhs: The kernel, bfloat16.
        params: The parameters of the ``conv_general_dilated``.

    Returns:
        The convolution, bfloat16; None where oneDNN is no faster.
    """
    numbers = params["dimension_numbers"]
    groups, features = params["feature_group_count"], lhs.shape[numbers.lhs_spec[1]]
    if params["batch_group_count"] != 1 or groups not in (1, features):
        return None
    dilation = params["lhs_dilation"]
    if (growth := math.prod(dilation)) > 1:
        if growth > _MOST_GROWTH or rhs.shape[numbers.rhs_spec[0]] < _LEAST_FEATURES:
            return None
        widths = [(0, 0, 0)] * lhs.ndim
        for i, pad, by in zip(numbers.lhs_spec[2:], params["padding"], dilation, strict=True):
            widths[i] = (*pad, by - 1)
        lhs = lax.pad(lhs, lhs.dtype.type(0), widths)
        ones, none = [1] * len(dilation), [(0, 0)] * len(dilation)
        params = {**params, "lhs_dilation": tuple(ones), "padding": tuple(none)}
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    params = {**params, "preferred_element_type": lhs.dtype}
    return lax.optimization_barrier(lax.conv_general_dilated_p.bind(lhs, rhs, **params))
