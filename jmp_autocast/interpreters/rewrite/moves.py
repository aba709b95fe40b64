"""Emits an equation that moves the elements of a source, such as a transpose.

A *source* is a value such as a parameter. Its copies are made when a consumer needs them. A 16-bit
copy of the result is the moved 16-bit copy of the operand. A copy in another encoding, such as
float8, has a key which decides: the operand's copy is moved, or is used as it is, or the result is
encoded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from ...policies import FLOAT_DTYPES
from ..compat import JaxprEqn, current_name_stack, equation_context, mark_frames
from ..plan.copies import CopyKey
from ..plan.data import EquationPlan
from ..primitives.cached_bind import bind_cached, cast
from ..primitives.reading import cast_dtype
from ..primitives.traits import having
from .values import Value

mark_frames(__file__)

_WHOLE = having("whole")


def moved(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[Any]) -> list[Value]:
    """Moves the elements of a source; a 16-bit copy of a result is the moved copy of the operand.

    Args:
        eqn: The equation.
        plan: Its plan, whose action is `Move`.
        operands: Its operands, each a `Value` or `Scalar`.

    Returns:
        Its results.
    """
    results = arrays = [value.array for value in operands]
    # A cast is bound only if it casts to the planned dtype, such as a cast of an integer or bool.
    # Any other cast changes only the weak type, and returns its operand.
    if cast_dtype(eqn) in (None, plan.results[0].dtype):
        results = bind_cached(eqn.primitive, arrays, eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
    # A copy is computed at its first use, in the scopes of the move.
    stack = current_name_stack()

    def copies_by(key: CopyKey) -> Sequence[Any]:
        if isinstance(key, np.dtype):
            return _moved_copies(eqn, operands, key)
        tag = plan.given[0].tag
        is_whole = eqn.primitive.name in _WHOLE and not (tag and tag.in_slices)
        # A result that is only a part of the operand is encoded anew, after the move.
        if not is_whole or key.when_moved == "anew":
            return [part.copy(key) for part in parts]
        moves = key.when_moved == "moves"
        return _moved_copies(eqn, operands, key) if moves else [operands[0].copy(key)]

    pairs = list(zip(results, plan.results, strict=True))
    parts = [Value(x, s.keeps_gradient, tag=s.tag) for x, s in pairs]
    made: dict[CopyKey, Sequence[Any]] = {}

    def copy(k: int, key: CopyKey) -> Any:
        if key not in made:
            with equation_context(eqn, stack):
                made[key] = copies_by(key)
        return made[key][k]

    return [Value(x, s.keeps_gradient, partial(copy, k)) for k, (x, s) in enumerate(pairs)]


def _moved_copies(eqn: JaxprEqn, operands: Sequence[Any], dtype: Any) -> Sequence[Any]:
    arrays = [value.copy(dtype) if _is_float(value) else value.array for value in operands]
    if eqn.primitive.name == "convert_element_type":
        # The program casts to float32 here. The 16-bit copy of the result is made by one cast of
        # the operand, without the cast to float32.
        return [cast(arrays[0], dtype)]
    if eqn.primitive.name == "sharding_constraint":
        # With the barrier, the 16-bit copy is transferred between devices. Otherwise, XLA would
        # move the cast behind the transfer, and transfer float32.
        arrays = lax.optimization_barrier(arrays)
    out = bind_cached(eqn.primitive, arrays, eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def _is_float(value: Any) -> bool:
    array = value.array
    return isinstance(array, float) or getattr(array, "dtype", None) in FLOAT_DTYPES
