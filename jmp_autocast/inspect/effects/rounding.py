"""One equation in a 16-bit dtype: what a product reads and what any operation returns is rounded.

A product adds up in float32, as matrix units do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...interpreters.compat import JaxprEqn, bound
from ...policies import CONTRACTIONS


def is_float(x: Any) -> bool:
    """Returns whether an array or number is rounded."""
    dtype = getattr(jax.typeof(x), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a matmul or a convolution."""
    return eqn.primitive.name in CONTRACTIONS


def rounded(x: Any, dtype: np.dtype) -> Any:
    """Returns a float rounded to a dtype, in its own dtype, and any other value as it is."""
    if not is_float(x):
        return x
    x = jnp.asarray(x)
    return x.astype(dtype).astype(x.dtype)


def lowered(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], dtype: np.dtype
) -> list[Any]:
    """Returns the results of an equation in a dtype.

    Args:
        eqn: The equation.
        operands: Its operands; only those of a product are read.
        results: Its results in float32.
        dtype: The dtype.
    """
    # The operands of any other operation are results of others, whose rounding counts there.
    if is_product(eqn):
        results = bound(eqn, [rounded(x, dtype) for x in operands])
    return [rounded(x, dtype) for x in results]
