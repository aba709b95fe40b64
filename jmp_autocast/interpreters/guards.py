"""Guards: literals that a 16-bit dtype cannot hold, and integer coordinates too large for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ..policies import DATA_MOVEMENT
from .plan import ValueState

_FOLDS = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
}

# A value that these make of coordinates is still one, or a scaled one.
_AFFINE = DATA_MOVEMENT | frozenset(
    """
    add add_any sub mul div neg max min select_n concatenate stack pad convert_element_type
    """.split()
)


@functools.cache
def representable(value: float, dtype: np.dtype) -> bool:
    """True if a literal means the same in ``dtype``: it does not become inf, 0, 1 or -1.

    A mask of ``finfo(float32).min`` becomes -inf in a 16-bit dtype and a masked row NaN; ``1e-8``
    becomes 0 in float16; ``1 - 1e-7`` becomes 1 and its logarithm 0.

    Example:
        >>> import jax.numpy as jnp
        >>> representable(1e-8, jnp.dtype("float16")), representable(1e-8, jnp.dtype("bfloat16"))
        (False, True)
    """
    if not math.isfinite(value):
        return True
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(value).astype(dtype))
    return math.isfinite(rounded) and not (rounded in (0.0, 1.0, -1.0) and rounded != value)


def fold(primitive: str, operands: Sequence[ValueState]) -> float | None:
    """Returns the value of an equation all of whose operands are known, None where it is not."""
    function = _FOLDS.get(primitive)
    if function is None or any(state.known is None for state in operands):
        return None
    with np.errstate(all="ignore"):
        return float(function(*(np.float32(state.known) for state in operands)))


def coordinate_bound(
    primitive: str, operands: Sequence[ValueState], floats: Sequence[int]
) -> float | None:
    """Returns a bound of the integer coordinates in an equation's results.

    Args:
        primitive: The equation's primitive.
        operands: The states of its operands.
        floats: The positions of the operands that hold numbers (no predicates or indices).

    Returns:
        The bound, or None if the results hold no coordinates.
    """
    if primitive not in _AFFINE or all(operands[i].bound is None for i in floats):
        return None
    if primitive == "div" and operands[floats[0]].bound is None:
        return None  # a mean over a number of elements that the program counts
    sizes = [_magnitude(operands[i]) for i in floats]
    if primitive in ("add", "add_any", "sub"):
        return sum(sizes)
    if primitive == "mul":
        return math.prod(sizes) if 0.0 not in sizes else 0.0
    if primitive == "div":
        divisor = operands[floats[-1]].known
        return sizes[0] / abs(divisor) if divisor else sizes[0]
    return max(sizes)


def _magnitude(state: ValueState) -> float:
    if state.known is not None:
        return abs(state.known)
    return math.inf if state.bound is None else state.bound
