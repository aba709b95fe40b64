"""`tangent_carrier`: zeros with the derivative of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..interpreters.compat.registration import (
    define_primitive,
    is_zero,
    lowers_by_platform,
    zero_tangent,
)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = tangent_carrier_p.bind(*primals)
    return out, zero_tangent(out) if is_zero(tangents[0]) else tangents[0]


def _batch(operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, int | None]:
    return tangent_carrier_p.bind(*operands), dims[0]


# The residual of a backward pass is an 8-bit array, whose tangent would have 8 bits in JAX. The
# second derivative goes through a further operand, which has no consumer. It is a constant zero, so
# that XLA keeps nothing for it.
tangent_carrier_p: Any = define_primitive(
    "tangent_carrier", value=jnp.zeros_like, aval=lambda x: x, jvp=_jvp, batch=_batch
)
lowers_by_platform(tangent_carrier_p, default=jnp.zeros_like)


def tangent_carrier(x: Any) -> Any:
    """Returns zeros of the type of an array, with the derivative of the array.

    Args:
        x: A float array.

    Example:
        >>> import jax
        >>> zero, tangent = jax.jvp(tangent_carrier, (3.0,), (2.0,))
        >>> float(zero), float(tangent)
        (0.0, 2.0)
    """
    return tangent_carrier_p.bind(x)
