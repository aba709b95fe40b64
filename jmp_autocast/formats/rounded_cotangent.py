"""`rounded_cotangent`: the identity, whose transpose rounds to the format of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..interpreters.compat.registration import (
    at_front,
    define_primitive,
    is_zero,
    lowers_to_operand,
    zero_tangent,
)
from ..interpreters.plan.structural import as_made, plans
from ..policies import Emulated
from .rounding import as_emulated


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = rounded_cotangent_p.bind(*primals, **params)
    (tangent,) = tangents
    if is_zero(tangent):
        return out, zero_tangent(out)
    return out, rounded_cotangent_p.bind(tangent, **params)


def _transpose(cotangent: Any, x: Any, *, emulated: Emulated, **params: Any) -> list[Any]:
    if is_zero(cotangent):
        return [None]
    return [as_emulated(emulated, emulated.gradient, cotangent, **params)]


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, axis: int, **params: Any
) -> tuple[Any, int]:
    (x,), (dim,) = operands, dims
    assert dim is not None
    # Counted from the end, the dimension of the blocks stays what it is.
    axis = axis if axis < 0 else axis + 1
    return rounded_cotangent_p.bind(at_front(x, dim, x.shape[dim]), axis=axis, **params), 0


# A function with a derivative rule of its own has no transpose, and no tangents where it has a
# transpose: what a `custom_jvp` returns has to be linear, which this is.
rounded_cotangent_p: Any = define_primitive(
    "rounded_cotangent",
    value=lambda x, **_: x,
    aval=lambda x, **_: x,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
lowers_to_operand(rounded_cotangent_p, 0)
plans("rounded_cotangent")(as_made)


def rounded_cotangent(x: Any, emulated: Emulated, axis: int = -1, draw: int = 0) -> Any:
    """Returns an array as it is; its cotangent is rounded to the format of gradients.

    Args:
        x: A float array.
        emulated: Whose ``gradient`` is the format.
        axis: The dimension along which elements share scales.
        draw: Tells the draws of arrays apart, if the rounding is stochastic.

    Example:
        >>> import jax
        >>> from jmp_autocast import Emulated
        >>> f = lambda x: 1.1 * rounded_cotangent(x, Emulated("e4m3"))
        >>> print(f(1.0), jax.grad(f)(1.0))
        1.1 1.0
    """
    return rounded_cotangent_p.bind(x, emulated=emulated, axis=axis, draw=draw)
