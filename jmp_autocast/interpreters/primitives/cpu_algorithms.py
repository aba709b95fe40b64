"""Dot algorithms on CPUs: float32 products written out as products of bfloat16 parts.

XLA:CPU ignores ``precision=DotAlgorithmPreset.BF16_BF16_F32_X3``, without a word. A float32 number
is the sum of three bfloat16 ones, and a product of two is that of their parts: the largest for
``BF16_BF16_F32``, with two parts of each for ``_X3``, with three for ``_X6`` and ``_X9``, added up
in float32. Each is a product of `cpu_products`. At n = 1024 ``_X3`` is off by 4e-6, and ``_X6`` by
1e-7 where float32 itself is off by 4e-7 (JAX 0.10 and 0.12, AMX).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...policies import FLOAT32
from ..compat import JaxprEqn, bind
from .cpu_products import is_outer, matmul

_BFLOAT16 = jnp.dtype(jnp.bfloat16)

# Which parts of the operands are multiplied, the smallest products first: 0 is the largest part.
_ONE = ((0, 0),)
_THREE = ((0, 1), (1, 0), *_ONE)
_SIX = ((1, 1), (0, 2), (2, 0), *_THREE)
_PAIRS = {1: _ONE, 3: _THREE, 6: _SIX, 9: ((2, 2), (1, 2), (2, 1), *_SIX)}

_Preset = lax.DotAlgorithmPreset
_OF_FLOAT32 = (_Preset.DEFAULT, _Preset.F32_F32_F32)
_PRODUCTS = {
    _Preset.BF16_BF16_F32: 1,
    _Preset.BF16_BF16_F32_X3: 3,
    _Preset.BF16_BF16_F32_X6: 6,
    _Preset.BF16_BF16_F32_X9: 9,
}


def asks_for_algorithm(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """Returns whether a float32 matmul names an algorithm other than float32's own.

    Args:
        primitive: The primitive of an equation.
        operands: Its operands, or their abstract values.
        params: Its parameters.
    """
    if primitive.name != "dot_general":
        return False
    algorithm = params["precision"]
    named = isinstance(algorithm, lax.DotAlgorithm | _Preset) and algorithm not in _OF_FLOAT32
    dtypes = (*(x.dtype for x in operands), params["preferred_element_type"] or FLOAT32)
    return named and all(dtype == FLOAT32 for dtype in dtypes)


def in_algorithm(
    eqn: JaxprEqn, xs: Sequence[Any], lacks: str | None, *, exchanged: bool = False
) -> Any:
    """Returns a float32 ``dot_general`` as products of parts, according to its algorithm.

    If that is not possible it is multiplied in float32, with a warning.

    Args:
        eqn: Its equation.
        xs: Its operands.
        lacks: Why this machine has no fast bfloat16 products; None if it has them.
        exchanged: As for `cpu_products.product`.
    """
    algorithm = eqn.params["precision"]
    count = _products_of(algorithm)
    if count is not None and lacks is None:
        multiplied = functools.partial(matmul, params=eqn.params, dtype=FLOAT32)
        pairs = _PAIRS[count]
        left, right = (_parts(x, 1 + max(max(pair) for pair in pairs)) for x in xs)
        products = [multiplied(left[i], right[j], exchanged=exchanged) for i, j in pairs]
        if products[0] is not None:
            *small, largest = products
            if not small:
                return largest
            rest = functools.reduce(lax.add, small)
            # Infinity times the zero that is left of an exact number.
            return largest + jnp.where(lax.is_finite(rest), rest, 0)
        lacks = "its sizes are symbols, or it is split over devices"
    in_float32 = {**eqn.params, "precision": None}
    if is_outer(xs[0], eqn.params):
        return bind(eqn.primitive, xs, in_float32)
    name = getattr(algorithm, "name", str(algorithm))
    fix = "Leave the precision out on CPUs."
    if count is None:
        lacks = "XLA:CPU does not know it"
        fix = (
            "On CPUs, ask for 'bf16_bf16_f32_x3' (an error of 4e-6), '_x6' or '_x9', or leave the "
            "precision out."
        )
    warnings.warn(
        f"A product with precision {name} runs in float32 on this CPU, and no faster: {lacks}. "
        f"{fix}",
        stacklevel=2,
    )
    return bind(eqn.primitive, xs, in_float32)


def _products_of(algorithm: Any) -> int | None:
    """Returns the number of bfloat16 products of an algorithm, None for another kind."""
    if isinstance(algorithm, _Preset):
        return _PRODUCTS.get(algorithm)
    # The dtypes of the operands and of the sum, the parts of each operand, the products of parts.
    *dtypes, left, right, count, _ = algorithm
    is_ours = dtypes == [_BFLOAT16, _BFLOAT16, FLOAT32] and left == right
    return count if is_ours and count in _PAIRS else None


def _parts(x: Any, count: int) -> list[Any]:
    """Returns bfloat16 arrays that add up to a float32 one, the largest first."""
    parts = []
    for _ in range(count):
        # XLA may leave out a cast to bfloat16 and back, and the next part would be zero.
        high = lax.reduce_precision(x, 8, 7)
        parts.append(lax.convert_element_type(high, _BFLOAT16))
        # The remainder of an infinite element is NaN, but the product is infinite.
        x = jnp.where(lax.is_finite(high), x - high, 0)
    return parts
