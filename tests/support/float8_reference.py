"""Products in 8 bits as the recipe has them, in NumPy and float64."""

import math

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def rounded(x, dtype=E4M3):
    """The numbers of an array after they were quantized with the largest power of two that fits."""
    x = np.asarray(x, np.float32)
    scale = 2.0 ** math.floor(math.log2(LARGEST[dtype] / np.abs(x).max()))
    return (x * np.float32(scale)).astype(dtype).astype(np.float64) / scale


def bfloat16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def layer(x, w, g, gradient=E5M2, wgrad="float8"):
    """``x @ w``, and the gradients with respect to both for a cotangent ``g``."""
    x8, w8, g8 = rounded(x), rounded(w), rounded(bfloat16(g), gradient)
    dw = x8.T @ g8 if wgrad == "float8" else bfloat16(x).T @ bfloat16(g)
    return x8 @ w8, g8 @ w8.T, dw
