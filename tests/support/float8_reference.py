"""Products in 8 bits as the recipe has them, in NumPy and float64."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def scale_of(x, dtype=E4M3, axis=None):
    """The largest powers of two that fit: of the array, or of what lies along some axes of it."""
    largest = np.abs(np.asarray(x, np.float64)).max(axis=axis, keepdims=axis is not None)
    return 2.0 ** np.floor(np.log2(LARGEST[dtype] / largest))


def rounded(x, dtype=E4M3, axis=None):
    """The numbers of an array after they were quantized."""
    scale = scale_of(x, dtype, axis)
    return (np.asarray(x, np.float64) * scale).astype(dtype).astype(np.float64) / scale


def bfloat16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def layer(x, w, g, gradient=E5M2, wgrad="float8"):
    """``x @ w``, and the gradients with respect to both for a cotangent ``g``."""
    x8, w8, g8 = rounded(x), rounded(w), rounded(bfloat16(g), gradient)
    dw = x8.T @ g8 if wgrad == "float8" else bfloat16(x).T @ bfloat16(g)
    return x8 @ w8, g8 @ w8.T, dw


def layer_by_row(x, w, g, gradient=E5M2, wgrad="float8"):
    """The same with scales of rows: those that a gradient sums over multiply the cotangent."""
    g, of_x, of_w = bfloat16(g), scale_of(x, axis=1), scale_of(w, axis=0)
    x8, w8 = rounded(x, axis=1), rounded(w, axis=0)
    dx = rounded(g / of_w, gradient, axis=1) @ (w8 * of_w).T
    dw = (x8 * of_x).T @ rounded(g / of_x, gradient, axis=0)
    return x8 @ w8, dx, dw if wgrad == "float8" else bfloat16(x).T @ g
