"""What is known of values at trace time: literals, folded constants, bounds of coordinates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..primitives.traits import FOLDS, having
from .data import Source, ValueState, float_dtype

_AFFINE = having("affine")


def literal_state(literal: Any) -> ValueState:
    """Returns what is known of a literal of a jaxpr."""
    dtype = float_dtype(literal.aval)
    shape = getattr(literal.aval, "shape", None)
    if shape == () and isinstance(literal.val, bool | int | float | np.generic | np.ndarray):
        value = np.asarray(literal.val)
        if value.dtype.kind in "iufb" or dtype is not None:
            source = Source.LITERAL if dtype else None
            return ValueState(dtype, source, known_value=float(value))
    return ValueState(dtype, Source.CONST if dtype else None)


@functools.cache
def representable(value: float, dtype: np.dtype) -> bool:
    """Returns whether a literal means the same in ``dtype``: it does not become inf, 0, 1 or -1.

    A mask of ``finfo(float32).min`` becomes -inf in a 16-bit dtype and a masked row NaN; ``1e-8``
    becomes 0 in float16; ``1 - 1e-7`` becomes 1 and its logarithm 0.

    Args:
        value: The value of every element of the literal.
        dtype: A compute dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> representable(1e-8, jnp.dtype("float16")), representable(1e-8, jnp.dtype("bfloat16"))
        (False, True)
    """
    # An infinite mask, or a NaN that the program writes down, means the same in every dtype.
    if not math.isfinite(value):
        return True
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(value).astype(dtype))
    return math.isfinite(rounded) and not (rounded in (0.0, 1.0, -1.0) and rounded != value)


def fold(primitive: str, operands: Sequence[ValueState]) -> float | None:
    """Returns the value of an equation all of whose operands are known, None where it is not.

    Args:
        primitive: The equation's primitive.
        operands: What is known of each operand.
    """
    function = FOLDS.get(primitive)
    if function is None or any(state.known_value is None for state in operands):
        return None
    # Folded in float32, as XLA would compute it: the literal is guarded by the value it has there.
    with np.errstate(all="ignore"):
        return float(function(*(np.float32(state.known_value) for state in operands)))


def coordinate_bound(
    primitive: str, operands: Sequence[ValueState], floats: Sequence[int]
) -> float | None:
    """Returns an upper bound of the integer coordinates in an equation's results.

    bfloat16 tells integers up to 256 apart, float16 up to 2,048: row 257 of an image would become
    row 256.

    Args:
        primitive: The equation's primitive.
        operands: What is known of each operand.
        floats: The positions of the operands that hold numbers (no predicates or indices).

    Returns:
        The bound, or None if the results hold no coordinates.
    """
    if primitive not in _AFFINE or all(operands[i].integer_bound is None for i in floats):
        return None
    if primitive == "div" and operands[floats[0]].integer_bound is None:
        # 1 / n is a weight, however large n is.
        return None  # a mean over a number of elements that the program counts
    magnitudes = [_magnitude(operands[i]) for i in floats]
    if primitive in ("add", "add_any", "sub"):
        return sum(magnitudes)
    if primitive == "mul":
        return math.prod(magnitudes) if 0.0 not in magnitudes else 0.0
    if primitive == "div":
        divisor = operands[floats[-1]].known_value
        return magnitudes[0] / abs(divisor) if divisor else magnitudes[0]
    return max(magnitudes)


def _magnitude(state: ValueState) -> float:
    if state.known_value is not None:
        return abs(state.known_value)
    # A factor that nothing is known of may take the coordinates anywhere.
    return math.inf if state.integer_bound is None else state.integer_bound
