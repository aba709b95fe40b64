"""Products and convolutions in float64 by NumPy, with their derivatives.

XLA is no judge of itself: on JAX 0.10 a float32 convolution of it returns 1e31 for some windows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Exact = tuple[np.ndarray, Callable[[np.ndarray], list[np.ndarray]]]


def error(found: Any, exact: np.ndarray) -> float:
    """The relative error in the L2 norm, of an exact zero the norm itself."""
    found = np.asarray(found, np.float64)
    assert found.shape == exact.shape
    return float(np.linalg.norm(found - exact) / (np.linalg.norm(exact) or 1))


def exact_einsum(form: str, *arrays: Any) -> Exact:
    """A sum of products, and from a cotangent to the gradients of its two operands."""
    a, b = (np.asarray(x, np.float64) for x in arrays)
    inputs, output = form.split("->")
    left, right = inputs.split(",")

    def pullback(g: np.ndarray) -> list[np.ndarray]:
        return [
            np.einsum(f"{output},{right}->{left}", g, b),
            np.einsum(f"{output},{left}->{right}", g, a),
        ]

    return np.einsum(form, a, b), pullback


def exact_convolution(x: Any, w: Any, params: dict[str, Any]) -> Exact:
    """A convolution from the parameters of its equation, and from a cotangent to the gradients."""
    numbers = params["dimension_numbers"]
    images = np.transpose(np.asarray(x, np.float64), numbers.lhs_spec)
    kernel = np.transpose(np.asarray(w, np.float64), numbers.rhs_spec)
    # Where each element of a patch stands in the images, counted from 1; 0 is padding.
    places = np.arange(1, images.size + 1).reshape(images.shape)
    for axis, ((low, high), by) in enumerate(
        zip(params["padding"], params["lhs_dilation"], strict=True), 2
    ):
        spread = np.zeros(
            [(n - 1) * by + 1 if i == axis else n for i, n in enumerate(places.shape)], int
        )
        np.moveaxis(spread, axis, 0)[::by] = np.moveaxis(places, axis, 0)
        widths = [(max(low, 0), max(high, 0)) if i == axis else (0, 0) for i in range(x.ndim)]
        padded = np.moveaxis(np.pad(spread, widths), axis, 0)
        places = np.moveaxis(padded[max(-low, 0) : len(padded) - max(-high, 0)], 0, axis)
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    window, groups = kernel.shape[2:], params["feature_group_count"]
    sizes = [
        max((n - (k - 1) * d - 1) // s + 1, 0)
        for n, k, s, d in zip(places.shape[2:], window, strides, dilation, strict=True)
    ]
    count, out, points = len(images), len(kernel), int(np.prod(sizes))
    patches = []
    for at in np.ndindex(*window):
        steps = zip(at, dilation, sizes, strides, strict=True)
        part = tuple(slice(p * d, p * d + max((n - 1) * s + 1, 0), s) for p, d, n, s in steps)
        patches.append(places[(slice(None), slice(None), *part)])
    patch = np.stack(patches).reshape(len(patches), count, groups, kernel.shape[1], points)
    read = np.concatenate([[0.0], images.ravel()])[patch]
    parts = kernel.reshape(groups, out // groups, kernel.shape[1], len(patches))
    found = np.einsum("kngis,goik->ngos", read, parts).reshape(count, out, *sizes)

    def pullback(g: np.ndarray) -> list[np.ndarray]:
        c = np.transpose(np.asarray(g, np.float64), numbers.out_spec)
        c = c.reshape(count, groups, out // groups, points)
        of_patch = np.einsum("ngos,goik->kngis", c, parts)
        of_images = np.bincount(patch.ravel(), of_patch.ravel(), images.size + 1)[1:]
        of_kernel = np.einsum("kngis,ngos->goik", read, c).reshape(kernel.shape)
        return [
            np.transpose(of_images.reshape(images.shape), np.argsort(numbers.lhs_spec)),
            np.transpose(of_kernel, np.argsort(numbers.rhs_spec)),
        ]

    return np.transpose(found, np.argsort(numbers.out_spec)), pullback
