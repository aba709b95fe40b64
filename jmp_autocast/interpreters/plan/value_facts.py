"""Facts about values at trace time: literals, folded constants, bounds of coordinates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import FLOAT32, Policy
from ..compat import Atom, Literal
from ..primitives.clamped_cast import clamped
from ..primitives.traits import FOLDS, having
from .avals import float_dtype
from .copies import products_of
from .data import Source, ValueState
from .marks import GIVEN, PARAMETER

_AFFINE = having("affine")
_NUMBERS = (bool, int, float, np.generic, np.ndarray)


def input_states(
    variables: Sequence[Atom], sources: Sequence[Source], policy: Policy
) -> list[ValueState]:
    """Returns the states of the inputs of a program.

    Args:
        variables: The inputs.
        sources: The kind of each input.
        policy: The policy of the program.
    """
    products = products_of(policy)
    tag = None if products is None else products.tag

    @functools.cache
    def state(dtype: np.dtype | None, source: Source) -> ValueState:
        if dtype is None:
            return ValueState(None)
        if source is Source.PARAM:
            return ValueState(dtype, source, tag=tag, marks=PARAMETER)
        return ValueState(dtype, source, marks=GIVEN)

    return [state(float_dtype(v.aval), s) for v, s in zip(variables, sources, strict=True)]


def literal_state(literal: Literal) -> ValueState:
    """Returns the state of a literal of a jaxpr.

    Args:
        literal: The literal.
    """
    dtype = float_dtype(literal.aval)
    shape = getattr(literal.aval, "shape", None)
    if shape == () and isinstance(literal.val, _NUMBERS):
        value = np.asarray(literal.val)
        if value.dtype.kind in "iufb" or dtype is not None:
            source = Source.LITERAL if dtype else None
            return ValueState(dtype, source, known_value=float(value))
    return ValueState(dtype, Source.CONST if dtype else None)


def number_state(dtype: Any, target: np.dtype, state: ValueState) -> ValueState:
    """Returns the state of an integer or bool that is cast to a float: a source, with its bound.

    Args:
        dtype: The dtype before the cast: a bool's, an integer's, or another one.
        target: The float dtype.
        state: The state before the cast.
    """
    kind = dtype.kind if isinstance(dtype, np.dtype) else ""
    if kind not in tuple("biu"):
        return ValueState(target, narrowed_by_user=target != FLOAT32)
    if state.known_value is not None:
        return ValueState(target, Source.LITERAL, state.known_value)
    if dtype.itemsize == 1:
        # A bool or a byte may be rounded: every float dtype holds integers up to 256.
        return ValueState(target, Source.CONST, may_be_rounded=True)
    bound = np.inf if state.integer_bound is None else state.integer_bound
    return ValueState(target, Source.DATA, integer_bound=bound)


@functools.lru_cache(4096)
def representable(value: float, dtype: np.dtype) -> bool:
    """Returns whether a literal keeps its meaning in ``dtype``: it becomes no inf, 0, 1 or -1.

    In float16 a mask of -1e9 becomes -inf, and a masked row NaN; ``1e-8`` becomes 0; ``1 - 1e-7``
    becomes 1, and its logarithm 0. In bfloat16 nothing finite becomes infinite:
    ``finfo(float32).min`` is clamped to the lowest bfloat16 number, an error of 2**-8, no more than
    that of other numbers (`clamped`).

    Args:
        value: The value of every element of the literal.
        dtype: A compute dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> representable(1e-8, jnp.dtype("float16")), representable(1e-8, jnp.dtype("bfloat16"))
        (False, True)
    """
    # An infinity or a NaN in the program is the same in every dtype.
    if not math.isfinite(value):
        return True
    rounded = float(clamped(value, dtype))
    return math.isfinite(rounded) and not (rounded in (0.0, 1.0, -1.0) and rounded != value)


def fold(primitive: str, operands: Sequence[ValueState]) -> float | None:
    """Folds an equation: returns its value if all operands are known, else None.

    Args:
        primitive: The equation's primitive.
        operands: The states of its operands.
    """
    function = FOLDS.get(primitive)
    if function is None or any(state.known_value is None for state in operands):
        return None
    # The literal is folded in the declared dtype, as XLA would compute it: guards check its value.
    with np.errstate(all="ignore"):
        return float(function(*(FLOAT32.type(state.known_value) for state in operands)))


def coordinate_bound(
    primitive: str, operands: Sequence[ValueState], floats: Sequence[int]
) -> float | None:
    """Returns an upper bound of the integer coordinates in an equation's results.

    bfloat16 represents integers up to 256, float16 up to 2,048: row 257 of an image would become
    row 256.

    Args:
        primitive: The equation's primitive.
        operands: The states of its operands.
        floats: The positions of the operands that hold numbers (no predicates or indices).

    Returns:
        The bound, or None if the results hold no coordinates.
    """
    if primitive not in _AFFINE or all(operands[i].integer_bound is None for i in floats):
        return None
    magnitudes = [m for i in floats if (m := _magnitude(operands[i])) is not None]
    # If an operand is no coordinate, the result is data. If a product of an integer mask and
    # activations held coordinates, later matmuls would be float32 (59 % of an encoder's FLOPs).
    if len(magnitudes) < len(floats):
        return None
    if primitive in ("add", "add_any", "sub"):
        return sum(magnitudes)
    if primitive == "mul":
        return math.prod(magnitudes) if 0.0 not in magnitudes else 0.0
    if primitive == "div":
        divisor = operands[floats[-1]].known_value
        return magnitudes[0] / abs(divisor) if divisor else magnitudes[0]
    return max(magnitudes)


def _magnitude(state: ValueState) -> float | None:
    return state.integer_bound if state.known_value is None else abs(state.known_value)
