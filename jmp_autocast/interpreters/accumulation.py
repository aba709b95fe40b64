"""Contractions in 16 bits that hand out their float32 accumulator, in both directions.

``preferred_element_type=float32`` does so going forward, but JAX's own transpose of it multiplies
the float32 cotangent with a 16-bit operand: a matmul in float32. The gradient of a weight is then
rounded to 16 bits all the same, because a weight's copy is 16 bits wide. The primitive here is
closed under differentiation instead: it is linear in each of its two operands, and its transpose
is again a contraction of two 16-bit operands, which hands out what the operand it belongs to asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ..policies import CONTRACTIONS, FLOAT32
from .casts import leaf_view
from .compat import (
    Tracer,
    bind,
    body_of,
    define_bilinear,
    inlined,
    jaxpr_as_fun,
    with_dtype,
)
from .emit import emit


def accumulating_contraction(
    primitive: Any,
    params: dict[str, Any],
    lhs: Any,
    rhs: Any,
    *rest: Any,
    out: Any,
    full: tuple[Any, Any] = (None, None),
) -> Any:
    """Contracts two 16-bit arrays and returns the result in the dtype that is asked for.

    In derivatives, too, both operands of every contraction are 16 bits wide, and cotangents are
    cast to that dtype. The derivative with respect to a 16-bit operand has its dtype.

    Args:
        primitive: ``dot_general``, ``conv_general_dilated`` or ``ragged_dot_general``.
        params: Its parameters; ``preferred_element_type`` is ignored.
        lhs: The left operand, float16 or bfloat16.
        rhs: The right operand, in the dtype of ``lhs``.
        *rest: Operands without a derivative: the group sizes of ``ragged_dot_general``.
        out: The dtype of the result: float32 or that of ``lhs``.
        full: For an operand that is the copy of a float32 leaf, the leaf, and else None. The
            derivative is then with respect to the leaf: its gradient is the accumulator of the
            transposed contraction, float32 and never rounded.

    Returns:
        The contraction, of dtype ``out``.

    Raises:
        AssertionError: If the operands are not of one 16-bit dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax import lax
        >>> params = dict(
        ...     dimension_numbers=(((1,), (0,)), ((), ())),
        ...     precision=None,
        ...     preferred_element_type=None,
        ...     out_sharding=None,
        ... )
        >>> def f(w, x):
        ...     low = w.astype(jnp.bfloat16)
        ...     return accumulating_contraction(
        ...         lax.dot_general_p, params, x, low, out=jnp.float32, full=(None, w)
        ...     ).sum()
        >>> x = jnp.array([[256.0], [1.0]], jnp.bfloat16)
        >>> w = jnp.ones((1, 1))
        >>> float(f(w, x)), float(jax.grad(f)(w, x)[0, 0])  # 257 is no bfloat16
        (257.0, 257.0)
    """
    low, out = np.dtype(lhs.dtype), np.dtype(out)
    if rhs.dtype != low or low.itemsize != 2:
        raise AssertionError(f"not of one 16-bit dtype: {low}, {rhs.dtype}")
    leaves = tuple(i for i, leaf in enumerate(full) if isinstance(leaf, Tracer))
    operands = (lhs, rhs, *rest, *(full[i] for i in leaves))
    if low == out and not leaves:
        return emit(primitive, operands, {**params, "preferred_element_type": low})
    items = tuple({**params, "preferred_element_type": low}.items())
    return _inlined(primitive, items, out, leaves)(*operands)


@functools.lru_cache(maxsize=4096)
def _inlined(
    primitive: Any, params: tuple[tuple[str, Any], ...], out: np.dtype, leaves: tuple[int, ...]
) -> Callable[..., Any]:
    def contraction(*operands: Any) -> Any:
        return [bind(primitive, operands, dict(params))]

    def call(*operands: Any) -> Any:
        low = operands[0].dtype
        jaxpr = _trace(contraction, low, operands[: len(operands) - len(leaves)])
        return accumulate_p.bind(*operands, jaxpr=jaxpr, low=low, out=out, leaves=leaves)

    return inlined(call)


# --- the primitive --------------------------------------------------------------------------
#
# accumulate(lhs, rhs, *rest, *leaves; jaxpr, low, out, leaves)
#
# `jaxpr` takes (lhs, rhs, *rest) in dtype `low`, where it is linear in `lhs` and in `rhs`: data
# movement and one contraction. That JAX traces it again to transpose and to batch it is what
# makes every contraction, and the shardings of all, work alike. `leaves` are the indices of the
# operands whose derivative is that of one of the last operands.


def _operand_of(
    i: int, operands: Sequence[Any], leaves: tuple[int, ...]
) -> tuple[int, Any, Sequence[Any]] | None:
    """Returns which factor operand ``i`` differentiates, the other factor, and ``rest``."""
    count = len(operands) - len(leaves)
    if i < count and (i in leaves or i > 1):
        return None
    at = leaves[i - count] if i >= count else i
    other = operands[1 - at]
    if 1 - at in leaves:
        # A view, so that a second derivative reaches the leaf; what is saved for it is the copy.
        other = leaf_view(operands[count + leaves.index(1 - at)], other)
    return at, other, operands[2:count]


def _derivative(
    i: int, tangent: Any, operands: Sequence[Any], *, leaves: tuple[int, ...], **params: Any
) -> Any:
    found = _operand_of(i, operands, leaves)
    if found is None:
        return None
    at, other, rest = found
    factors = (tangent, other) if at == 0 else (other, tangent)
    return accumulate_p.bind(*factors, *rest, leaves=(), **params)


def _transpose(i: int, aval: Any, cotangent: Any, operands: Sequence[Any], **params: Any) -> Any:
    found = _operand_of(i, operands, params["leaves"])
    if found is None:
        return None
    at, other, rest = found
    factors = (cotangent, other, *rest)
    jaxpr = _trace(_transposed(params["jaxpr"], at), params["low"], factors)
    return accumulate_p.bind(*factors, jaxpr=jaxpr, low=params["low"], out=aval.dtype, leaves=())


def _batch(operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    count = len(operands) - len(params["leaves"])
    function = _batched(params["jaxpr"], tuple(dims[:count]))
    jaxpr = _trace(function, params["low"], operands[:count])
    return accumulate_p.bind(*operands, **{**params, "jaxpr": jaxpr})


@functools.lru_cache(maxsize=4096)
def _transposed(jaxpr: Any, at: int) -> Callable[..., Any]:
    def transposed(cotangent: Any, other: Any, *rest: Any) -> Any:
        def linear(x: Any) -> Any:
            factors = (x, other) if at == 0 else (other, x)
            return jaxpr_as_fun(jaxpr)(*factors, *rest)

        return jax.linear_transpose(linear, jaxpr.in_avals[at])([cotangent])

    return transposed


@functools.lru_cache(maxsize=4096)
def _batched(jaxpr: Any, dims: tuple[int | None, ...]) -> Callable[..., Any]:
    return jax.vmap(jaxpr_as_fun(jaxpr), in_axes=dims)


def _trace(function: Callable[..., Any], low: np.dtype, operands: Sequence[Any]) -> Any:
    """Returns the jaxpr of a function, the same one for the same types."""
    avals = (jax.typeof(x) for x in operands)
    low_avals = tuple(with_dtype(a, low) if a.dtype == FLOAT32 else a for a in avals)
    return _traced(function, low_avals, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=4096)
def _traced(function: Callable[..., Any], avals: tuple[Any, ...], mesh: Any) -> Any:
    # `jax.make_jaxpr` has a cache, too, but is slow to find things there. Of JAX's settings only
    # the mesh has a part in movements and one contraction whose parameters are given.
    return jax.make_jaxpr(function)(*avals)


def _aval(*avals: Any, jaxpr: Any, out: np.dtype, **_: Any) -> Any:
    return with_dtype(jaxpr.out_avals[0], out)


def _contraction(jaxpr: Any) -> Any:
    """Returns the one contraction of a jaxpr."""
    (eqn,) = (e for e in body_of(jaxpr).eqns if e.primitive.name in CONTRACTIONS)
    return eqn


def _evaluate(
    *operands: Any, widen: bool, jaxpr: Any, low: np.dtype, out: np.dtype, leaves: tuple[int, ...]
) -> Any:
    """Runs the jaxpr with the contraction's result, and all that follows it, in ``out``.

    With ``widen`` the contraction reads its operands in ``out``, too: the same products and sums.
    """
    body, contraction = body_of(jaxpr), _contraction(jaxpr)
    env = {}
    for v, x in zip(body.invars, operands, strict=False):  # leaves have no part in the value
        env[v] = lax.convert_element_type(x, low) if x.dtype == FLOAT32 else x
    for eqn in body.eqns:
        xs, params = [env[v] for v in eqn.invars], eqn.params
        if eqn is contraction:
            params = {**params, "preferred_element_type": out}
            if widen and out != low:
                # Otherwise XLA widens them where they are made, and keeps that until the backward
                # pass: 1.14 times the temporary bytes of a ViT (JAX 0.12).
                xs = lax.optimization_barrier(xs)
                xs = [lax.convert_element_type(x, out) if x.dtype == low else x for x in xs]
        results = bind(eqn.primitive, xs, params)
        results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return env[body.outvars[0]]


accumulate_p: Any = define_bilinear(
    "accumulate",
    aval=_aval,
    derivative=_derivative,
    transpose=_transpose,
    batch=_batch,
    lowered=functools.partial(_evaluate, widen=False),
    # XLA:CPU lacks the bfloat16 matmul with a float32 result in some layouts ("Unsupported element
    # type for DotThunk::Execute", JAX 0.10 to 0.12), and chooses the layouts itself.
    lowered_on_cpu=functools.partial(_evaluate, widen=True),
    contraction=_contraction,
)
