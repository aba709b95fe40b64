"""Facts about values at trace time: inputs, literals, folded constants."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...policies import FLOAT32, Policy
from ..compat import Atom, Literal
from ..primitives.clamped_cast import clamped
from ..primitives.traits import FOLDS
from .avals import float_dtype
from .copies import products_of
from .data import Source, ValueState
from .marks import GIVEN, PARAMETER


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

    def state(v: Atom, source: Source) -> ValueState:
        dtype = float_dtype(v.aval)
        if dtype is None:
            return ValueState(None)
        if source is Source.PARAM:
            return ValueState(dtype, source, tag=tag, marks=PARAMETER)
        return ValueState(dtype, source, marks=GIVEN)

    return list(map(state, variables, sources))


def literal_state(literal: Literal) -> ValueState:
    """Returns the state of a literal of a jaxpr.

    Args:
        literal: The literal.
    """
    dtype = float_dtype(literal.aval)
    shape = getattr(literal.aval, "shape", None)
    if shape == () and isinstance(literal.val, bool | int | float | np.generic | np.ndarray):
        value = np.asarray(literal.val)
        if value.dtype.kind in "iufb" or dtype is not None:
            source = Source.LITERAL if dtype else None
            return ValueState(dtype, source, known_value=float(value))
    return ValueState(dtype, Source.CONST if dtype else None)


def number_state(dtype: Any, target: np.dtype, state: ValueState) -> ValueState:
    """Returns the state of an integer or bool that is cast to a float: a source.

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
    return ValueState(target, Source.DATA)


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
