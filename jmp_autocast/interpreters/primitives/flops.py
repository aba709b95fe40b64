"""The floating point operations of an equation: a product, linear algebra or a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...policies import CONTRACTIONS
from ..compat import JAXPRS, AnyJaxpr, JaxprEqn, assumed_size, aval_of, body_of
from .held_contraction import contraction_in
from .reading import reduction_depth


def flops(eqn: JaxprEqn) -> int:
    """Returns an estimate of the floating point operations of one run of an equation.

    Each product that is summed counts as two operations, and products with padding as none. Each
    element that is reduced or computed counts as one. A factorization counts as the operations of
    its usual algorithm.
    """
    eqn = contraction_in(eqn) or eqn
    if (algorithm := _LINEAR_ALGEBRA.get(eqn.primitive.name)) is not None:
        (*batch, rows, columns), right = (
            [assumed_size(length) for length in aval_of(v).shape]
            for v in (eqn.invars[0], eqn.invars[-1])
        )
        count = math.prod(right) // max(math.prod((*batch, rows)), 1)
        each = algorithm(max(rows, columns), min(rows, columns), count)
        return round(math.prod(batch) * each)
    if eqn.primitive.name == "conv_general_dilated":
        return 2 * _convolution_products(eqn)
    results = sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)
    each = 2 if eqn.primitive.name in CONTRACTIONS else 1
    return each * results * reduction_depth(eqn)


def _tall(m: int, n: int, _: int) -> float:
    return 2 * m * n**2 - 2 * n**3 / 3


# The operations for a matrix of m rows and n columns, m >= n, with r right-hand sides: Golub and
# Van Loan, Matrix Computations, 4th edition, chapters 3 to 8. Eigenvectors and singular vectors are
# included.
_LINEAR_ALGEBRA: dict[str, Callable[[int, int, int], float]] = {
    "triangular_solve": lambda m, n, r: n**2 * r,
    "cholesky": lambda m, n, r: n**3 / 3,
    "lu": lambda m, n, r: m * n**2 - n**3 / 3,
    **dict.fromkeys(("qr", "geqrf", "geqp3", "householder_product"), _tall),
    "hessenberg": lambda m, n, r: 10 * n**3 / 3,
    "tridiagonal": lambda m, n, r: 4 * n**3 / 3,
    "eigh": lambda m, n, r: 9 * n**3,
    **dict.fromkeys(("eig", "schur"), lambda m, n, r: 25 * n**3),
    "svd": lambda m, n, r: 6 * m * n**2 + 20 * n**3,
}


def _convolution_products(eqn: JaxprEqn) -> Any:
    """Returns how many products a convolution sums, without products with padding or with holes.

    XLA's cost analysis counts the same products. Products with padding would be 20 % of a ResNet's
    training step on images of 16 x 16. With symbolic sizes, all products of a window count.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    avals = (*eqn.invars[:2], eqn.outvars[0])
    lhs, rhs, out = (
        [aval_of(v).shape[i] for i in spec] for v, spec in zip(avals, numbers, strict=True)
    )
    # The spatial dimensions follow the two dimensions of batch and features.
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
    """Returns how many pairs (result position, kernel position) read an element of the image.

    Args:
        size: The length of the image along a dimension.
        kernel: The length of the kernel.
        result: The length of the result.
        stride: The stride of the window.
        pad: The padding before the first element; negative if elements are cut off.
        dilation: The dilation of the image: 2 puts one hole between any two elements.
        kernel_dilation: The dilation of the kernel.

    Example:
        >>> pairs_that_meet(8, 3, 8, 1, 1, 1, 1)  # the first and the last window meet two
        22
    """
    starts = np.arange(kernel)[:, None] * kernel_dilation - pad
    at = starts + np.arange(result) * stride
    return int(np.sum((at % dilation == 0) & (at >= 0) & (at < size * dilation)))


_KERNELS = frozenset(("pallas_call", "custom_partitioning", "composite", "core_map", "mpmd_map"))


def kernel_flops(eqn: JaxprEqn) -> int:
    """Returns the FLOPs of the products in a kernel; 0 if they are unknown.

    Args:
        eqn: The equation of a kernel that keeps its declared dtypes.
    """
    estimate = getattr(eqn.params.get("cost_estimate"), "flops", None)
    if estimate:
        return int(estimate)
    held: Any = eqn.params.get("jaxpr", eqn.params.get("call"))
    if eqn.primitive.name not in _KERNELS or not isinstance(held, JAXPRS):
        return 0
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    steps = math.prod(n for n in grid if isinstance(n, int))
    return steps * _products_in(held)


def _products_in(jaxpr: AnyJaxpr) -> int:
    total = 0
    for eqn in body_of(jaxpr).eqns:
        if eqn.primitive.name in CONTRACTIONS:
            total += flops(eqn)
        length = eqn.params.get("length", 1)
        for value in eqn.params.values():
            for held in value if isinstance(value, tuple) else (value,):
                if isinstance(held, JAXPRS):
                    total += (length if isinstance(length, int) else 1) * _products_in(held)
    return total
