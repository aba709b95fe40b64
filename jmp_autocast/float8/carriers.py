"""Helper primitives of 8-bit products: `row_major` for layouts, `tangent_carrier` for tangents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..interpreters.compat import inlined
from ..interpreters.compat.registration import (
    acts_on_each_element,
    define_primitive,
    is_zero,
    lowers_by_platform,
    lowers_to_row_major,
    zero_tangent,
)

row_major_p: Any = define_primitive("row_major", value=lambda x: x, aval=lambda x: x)
acts_on_each_element(row_major_p)
lowers_to_row_major(row_major_p)
_inlined = inlined(row_major_p.bind)


def row_major(x: Any) -> Any:
    """Returns the array unchanged, and keeps XLA for GPUs from transposing its producer.

    cuBLASLt needs an 8-bit weight transposed, and XLA moves the transposition to the first producer
    of the weight. If a ``scan`` runs the layers, the first producer is the float32 stack of all
    weights, of which XLA made a transposed copy. For six layers of 2,048 x 8,192 under
    ``jax.checkpoint``, the temporaries on an H100 are 680 MiB without this primitive, 296 MiB with
    it, and 312 MiB in bfloat16. For a program on several GPUs the primitive changes nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> row_major(jnp.arange(3)).tolist()
        [0, 1, 2]
    """
    return _inlined(x)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = tangent_carrier_p.bind(*primals)
    return out, zero_tangent(out) if is_zero(tangents[0]) else tangents[0]


def _batch(operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, int | None]:
    return tangent_carrier_p.bind(*operands), dims[0]


# A backward pass reads an 8-bit residual, and in JAX the tangent of an 8-bit array has 8 bits. So
# the second derivative is taken with respect to a further operand of the product, the
# `tangent_carrier` of the array before quantization. This operand is a constant zero that the
# lowered product does not read, so XLA stores nothing.
tangent_carrier_p: Any = define_primitive(
    "tangent_carrier", value=jnp.zeros_like, aval=lambda x: x, jvp=_jvp, batch=_batch
)
lowers_by_platform(tangent_carrier_p, default=jnp.zeros_like)


def tangent_carrier(x: Any) -> Any:
    """Returns zeros like ``x``, whose tangent is the tangent of ``x``.

    Args:
        x: A float array.

    Example:
        >>> import jax
        >>> zero, tangent = jax.jvp(tangent_carrier, (3.0,), (2.0,))
        >>> float(zero), float(tangent)
        (0.0, 2.0)
    """
    return tangent_carrier_p.bind(x)
