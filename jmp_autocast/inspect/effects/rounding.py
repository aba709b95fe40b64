"""What it means to lower one equation to a number format.

A product reads its operands in the format, and adds up in float32, as matrix units do whatever they
multiply. Its result is rounded to a format of 16 bits; of fewer, as those of 8-bit products and of
scopes with a format are, it stays float32. Any other operation rounds its result alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...interpreters.compat import JaxprEqn, bound
from ...policies import CONTRACTIONS
from .number_format import Format, rounded


def is_float(x: Any) -> bool:
    """Returns whether an array or number is rounded."""
    dtype = getattr(jax.typeof(x), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def narrowed(x: Any, format: Format) -> Any:
    """Returns a value as a format has it, in its own dtype; what is no float comes back.

    Args:
        x: The value.
        format: The format.
    """
    if not is_float(x):
        return x
    x = jnp.asarray(x)
    return rounded(x.astype(jnp.float32), format).astype(x.dtype)


def lowered(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], format: Format
) -> list[Any]:
    """Returns the results of an equation that is lowered to a format.

    Args:
        eqn: The equation.
        operands: Its operands.
        results: Its results in float32.
        format: The format.
    """
    # What another operation reads was rounded, or not, where it was made: counted once more here,
    # the effects of a scope would add up to twice its own.
    if is_product(eqn):
        results = bound(eqn, [narrowed(x, format) for x in operands])
        if format.bits < 16:
            return list(results)
    return [narrowed(x, format) for x in results]


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a matmul or a convolution."""
    return eqn.primitive.name in CONTRACTIONS
