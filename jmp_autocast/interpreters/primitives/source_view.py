"""The primitive `source_view`: a 16-bit read of a parameter whose gradient adds up in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ..compat import Tracer, registration
from .cached_bind import with_cached_derivative


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = source_view_p.bind(*primals)
    if registration.is_zero(tangents[0]):
        return out, registration.zero_tangent(out)
    return out, lax.convert_element_type(tangents[0], out.dtype)


def _transpose(cotangent: Any, full: Any, low: Any) -> list[Any]:
    # Only `jax.linear_transpose` transposes a `source_view`: its JVP is a cast. The cotangent goes
    # to `full` alone, because the 16-bit copy `low` has no derivative.
    if registration.is_zero(cotangent) or not registration.is_undefined_primal(full):
        return [None, None]
    return [lax.convert_element_type(cotangent, full.aval.dtype), None]


def _batch(operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, int]:
    return source_view_p.bind(*registration.all_at_front(operands, dims)), 0


# A program has a `source_view` for each consumer of each parameter. It is a primitive and not a
# `custom_jvp` function, because a primitive is faster to trace: it is one equation, and lowers to
# no operation.
source_view_p: Any = registration.define_primitive(
    "source_view",
    value=lambda full, low: low,
    aval=lambda full, low: low,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
registration.lowers_to_operand(source_view_p, 1)
_view = with_cached_derivative(source_view_p.bind)


def source_view(full: Any, low: Any) -> Any:
    """Reads a source, such as a parameter, in 16 bits, with a gradient that adds up in float32.

    The value is ``low``; the derivative is the derivative of a cast of ``full``. Each consumer
    calls `source_view` by itself, so the cotangents of all uses are widened to float32 before they
    are added. A shared cast would add them in 16 bits: a weight with 513 uses and the gradient 2.0
    would get 1.5.

    Args:
        full: The source, a float32 array of any shape.
        low: Its 16-bit copy, of the same shape.

    Returns:
        ``low``, as a function of ``full``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jnp.ones(())
        >>> low = w.astype(jnp.bfloat16)
        >>> uses = lambda w: sum(
        ...     source_view(w, low).astype(jnp.float32) * 2 / 513 for _ in range(513)
        ... )
        >>> bool(abs(jax.grad(uses)(w) - 2.0) < 1e-2)
        True
    """
    return _view(full, low) if isinstance(full, Tracer) else low


def detached(x: Any) -> Any:
    """Returns an array without its derivative, also in a function that is linear in the array.

    The result is the `source_view` of a constant. `lax.stop_gradient` has no transpose, which JAX
    needs if the array is a tangent in a user's derivative rule.

    Args:
        x: An array.
    """
    return source_view_p.bind(np.float32(0), x) if isinstance(x, Tracer) else x
