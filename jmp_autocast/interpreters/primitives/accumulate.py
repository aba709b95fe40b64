"""Contractions of 16-bit operands that return their float32 accumulator, also in the backward pass.

With ``preferred_element_type=float32``, a contraction of JAX returns the accumulator in the forward
pass only. Its transpose multiplies the float32 cotangent with a 16-bit operand, which is a matmul
in float32, and still rounds the gradient of a weight to 16 bits, the dtype of the weight's copy.
The primitive here is closed under differentiation: it is linear in each of its two operands, and
its transpose is again a contraction of two 16-bit operands, whose result has the dtype that the
transposed operand needs.

A *source* is a float32 array, such as a parameter, of which an operand is a 16-bit copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...cpu_kernels import CPUKernels, cpu_kernels
from ...policies import FLOAT32
from ..compat import (
    ClosedJaxpr,
    JaxprEqn,
    Tracer,
    bind,
    body_of,
    bound,
    jaxpr_as_fun,
    literal_value,
    registration,
    with_dtype,
)
from ..compat.avals import has_other_cotangent
from .cached_bind import bind_cached, with_cached_derivative
from .cpu_convolutions import convolution
from .cpu_products import is_exchanged, matmul
from .evaluate import evaluate
from .held_contraction import contraction_aval, contraction_of, contractions_of, holds_contraction
from .source_view import source_view

_BFLOAT16 = np.dtype(jnp.bfloat16)


def accumulating_contraction(
    primitive: Any,
    params: dict[str, Any],
    lhs: Any,
    rhs: Any,
    *rest: Any,
    out: Any,
    full: tuple[Any, Any] = (None, None),
) -> Any:
    """Contracts two 16-bit arrays and returns the result in a given dtype.

    In derivatives, too, both operands of every contraction are 16 bits wide, because cotangents are
    cast to the dtype of the operands. The derivative with respect to a 16-bit operand has the
    operand's dtype.

    Args:
        primitive: ``dot_general``, ``conv_general_dilated`` or ``ragged_dot_general``.
        params: Its parameters; ``preferred_element_type`` is ignored.
        lhs: The left operand, float16 or bfloat16.
        rhs: The right operand, in the dtype of ``lhs``.
        *rest: Operands without a derivative: the group sizes of ``ragged_dot_general``.
        out: The dtype of the result: float32 or that of ``lhs``.
        full: For each operand that is a copy of a float32 source, the source; None for other
            operands. The derivative is then with respect to the source, and is the float32
            accumulator of the transposed contraction, which is never rounded.

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
    sources = tuple(i for i, source in enumerate(full) if isinstance(source, Tracer))
    operands = (lhs, rhs, *rest, *(full[i] for i in sources))
    of_own = low == out and is_lowered_by_us(primitive, (lhs, rhs), params)
    if low == out and not sources and not of_own:
        return bind_cached(primitive, operands, {**params, "preferred_element_type": low})
    # The jaxpr declares a 16-bit result, so that its transpose is again a contraction of 16-bit
    # operands. `out` is the dtype of the equation's result.
    items = tuple({**params, "preferred_element_type": low}.items())
    return _contraction(primitive, items, out, sources)(*operands)


def is_lowered_by_us(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """Returns whether a matmul or convolution needs the form of `cpu_products` on CPUs.

    If so, the `accumulate` primitive replaces the product even if its result is rounded to 16 bits,
    so that the products of its derivatives have this form as well.
    """
    if primitive.name not in _CPU_FORMS:
        return False
    asked = params["preferred_element_type"]
    return asked in (None, _BFLOAT16) and all(x.dtype == _BFLOAT16 for x in operands)


def tangent_contraction(lhs: Any, rhs: Any, dimension_numbers: Any, low: Any, out: Any) -> Any:
    """Multiplies a 16-bit array and a tangent.

    The transpose multiplies 16-bit operands, and its result has the dtype of the tangent.

    Args:
        lhs: The left operand, of dtype ``low`` or float32.
        rhs: The right operand, of dtype ``low`` or float32.
        dimension_numbers: The dimension numbers of ``lax.dot_general``.
        low: The dtype in which both operands are multiplied.
        out: The dtype of the result.
    """
    jaxpr = _trace(_dot_in(low, dimension_numbers), low, (lhs, rhs))
    return accumulate_p.bind(lhs, rhs, jaxpr=jaxpr, low=low, out=out, sources=())


@functools.lru_cache(maxsize=4096)
def _dot_in(dtype: np.dtype, dimension_numbers: Any) -> Callable[..., Any]:
    return lambda x, y: lax.dot_general(x, y, dimension_numbers, preferred_element_type=dtype)


@functools.lru_cache(maxsize=4096)
def _contraction(
    primitive: Any, params: tuple[tuple[str, Any], ...], out: np.dtype, sources: tuple[int, ...]
) -> Callable[..., Any]:
    def contraction(*operands: Any) -> Any:
        return [bind(primitive, operands, dict(params))]

    def call(*operands: Any) -> Any:
        low = operands[0].dtype
        jaxpr = _trace(contraction, low, operands[: len(operands) - len(sources)])
        return accumulate_p.bind(*operands, jaxpr=jaxpr, low=low, out=out, sources=sources)

    return with_cached_derivative(call)


# --- the primitive --------------------------------------------------------------------------
#
# accumulate(lhs, rhs, *rest, *sources; jaxpr, low, out, sources)
#
# `jaxpr` takes (lhs, rhs, *rest) in dtype `low` and is linear in `lhs` and in `rhs`. It consists of
# data movement and one contraction. It is transposed and batched by JAX's own rules, which cover
# all contractions and shardings. The parameter `sources` holds the positions of the factors that
# are 16-bit copies of sources. The derivative of such a factor belongs to its source, one of the
# last operands.


def _factor_of(
    i: int, operands: Sequence[Any], sources: tuple[int, ...]
) -> tuple[int, Any, Sequence[Any]] | None:
    """Finds the factor, ``lhs`` or ``rhs``, whose derivative belongs to one operand.

    Args:
        i: The position of the operand in ``operands``.
        operands: All operands of the primitive: ``lhs``, ``rhs``, ``*rest``, ``*sources``.
        sources: The positions of the factors that are copies of sources.

    Returns:
        The position (0 or 1) of this factor, the other factor, and ``rest``. None if the operand
        has no derivative: it is in ``rest``, or it is a copy, whose source has the derivative.
    """
    count = len(operands) - len(sources)
    if i < count and (i in sources or i > 1):
        return None
    at = sources[i - count] if i >= count else i
    other = operands[1 - at]
    if 1 - at in sources:
        # The other factor is the 16-bit copy of a source. Through the `source_view`, a second
        # derivative with respect to this factor reaches the source. The residual is the copy.
        other = source_view(operands[count + sources.index(1 - at)], other)
    return at, other, operands[2:count]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, sources: tuple[int, ...], **params: Any
) -> tuple[Any, Any]:
    out = accumulate_p.bind(*primals, sources=sources, **params)
    terms = []
    for i, tangent in enumerate(tangents):
        found = None if registration.is_zero(tangent) else _factor_of(i, primals, sources)
        if found is not None:
            at, other, rest = found
            factors = (tangent, other) if at == 0 else (other, tangent)
            terms.append(accumulate_p.bind(*factors, *rest, sources=(), **params))
    if not terms:
        return out, registration.zero_tangent(out)
    return out, functools.reduce(registration.add_tangents, terms)


def _transpose(
    cotangent: Any, *operands: Any, jaxpr: ClosedJaxpr, sources: tuple[int, ...], **params: Any
) -> list[Any]:
    def of_operand(i: int, operand: Any) -> Any:
        if registration.is_zero(cotangent) or not registration.is_undefined_primal(operand):
            return None
        if (found := _factor_of(i, operands, sources)) is None:
            return None
        at, other, rest = found
        factors = (cotangent, other, *rest)
        # The float32 cotangent is cast to 16 bits here. It is rounded once, as the cotangent of a
        # rounded result would be, and both contractions of the backward pass run on tensor cores.
        transposed = _trace(_transposed(jaxpr, at), params["low"], factors)
        if not contractions_of(transposed):
            # For a convolution with an empty result, JAX's transpose contains no contraction. The
            # cotangent is then zero.
            return jnp.zeros(operand.aval.shape, operand.aval.dtype)
        # `out` is the operand's own dtype, so that a float32 source gets the unrounded accumulator.
        own = {**params, "jaxpr": transposed, "out": operand.aval.dtype}
        return accumulate_p.bind(*factors, **own, sources=())

    return [of_operand(i, operand) for i, operand in enumerate(operands)]


def _batch(
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    sources: tuple[int, ...],
    **params: Any,
) -> tuple[Any, int]:
    operands, dims = list(operands), list(dims)
    size, count = registration.batch_size(operands, dims), len(operands) - len(sources)
    for k, i in enumerate(sources, count):
        if dims[i] != dims[k]:  # a source is batched as its copy is
            for j in (i, k):
                operands[j], dims[j] = registration.at_front(operands[j], dims[j], size), 0
    batched = _trace(_batched(jaxpr, tuple(dims[:count])), params["low"], operands[:count])
    return accumulate_p.bind(*operands, jaxpr=batched, sources=sources, **params), 0


@functools.lru_cache(maxsize=4096)
def _transposed(jaxpr: ClosedJaxpr, at: int) -> Callable[..., Any]:
    def transposed(cotangent: Any, other: Any, *rest: Any) -> Any:
        if has_other_cotangent(jaxpr.out_avals[0]):
            # `jax.linear_transpose` accepts only a cotangent of the result's type, but the
            # cotangent of an unreduced product is a reduced array.
            factors = (None, other) if at == 0 else (other, None)
            return [registration.transposed_by(jaxpr, (*factors, *rest), cotangent)]

        def linear(x: Any) -> Any:
            factors = (x, other) if at == 0 else (other, x)
            return jaxpr_as_fun(jaxpr)(*factors, *rest)

        return jax.linear_transpose(linear, jaxpr.in_avals[at])([cotangent])

    return transposed


@functools.lru_cache(maxsize=4096)
def _batched(jaxpr: ClosedJaxpr, dims: tuple[int | None, ...]) -> Callable[..., Any]:
    return jax.vmap(jaxpr_as_fun(jaxpr), in_axes=dims)


def _trace(function: Callable[..., Any], low: np.dtype, operands: Sequence[Any]) -> Any:
    """Returns the jaxpr of a function of 16-bit operands, the same object for equal types."""
    avals = (jax.typeof(x) for x in operands)
    low_avals = tuple(with_dtype(a, low) if a.dtype == FLOAT32 else a for a in avals)
    return _traced(function, low_avals, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=4096)
def _traced(function: Callable[..., Any], avals: tuple[Any, ...], mesh: Any) -> Any:
    # This cache is faster than that of `jax.make_jaxpr`. Of JAX's settings, its key holds the mesh
    # only, because no other setting affects data movement and a contraction with given parameters.
    return jax.make_jaxpr(function)(*avals)


def _bound(eqn: JaxprEqn, xs: list[Any], low: np.dtype, out: np.dtype) -> Any:
    return bind(eqn.primitive, xs, {**eqn.params, "preferred_element_type": out})


def _lowered(
    *operands: Any,
    jaxpr: ClosedJaxpr,
    low: np.dtype,
    out: np.dtype,
    sources: tuple[int, ...],
    contract: Callable[[JaxprEqn, list[Any], np.dtype, np.dtype], Any] = _bound,
) -> Any:
    """Evaluates a jaxpr; its contraction and all later equations run in dtype ``out``.

    ``contract`` computes the contraction from its equation, its operands, their dtype ``low`` and
    the dtype ``out`` of the result.
    """
    contraction = contraction_of(jaxpr)

    def step(i: int, eqn: JaxprEqn, xs: list[Any]) -> Sequence[Any]:
        return [contract(eqn, xs, low, out)] if eqn is contraction else bound(eqn, xs)

    # The last operands, the sources, receive derivatives but do not affect the value.
    factors = operands[: len(operands) - len(sources)]
    args = [lax.convert_element_type(x, low) if x.dtype == FLOAT32 else x for x in factors]
    # The jaxpr's own scopes are not used: all equal contractions share the jaxpr, and its scopes
    # are those of the first contraction that was traced.
    (result,) = evaluate(jaxpr, (), args, literal_value, step, lambda eqn: nullcontext())
    return result


def _widened(
    eqn: JaxprEqn, xs: list[Any], low: np.dtype, out: np.dtype, is_late: bool = True
) -> Any:
    """Contracts in float32, for CPUs without a 16-bit kernel for the equation.

    bfloat16 operands are always widened, because XLA of JAX 0.12 runs some forms in loops that
    accumulate in bfloat16. float16 operands of a float16 result are not, because XLA has no such
    loops in float16. With ``is_late``, a barrier delays the widening of the operands. Otherwise,
    XLA would widen them where they are computed and keep them wide until the backward pass: 1.14
    times the temporary bytes of a ViT (JAX 0.12).
    """
    if out == low == np.float16:
        return _bound(eqn, xs, low, out)
    xs = lax.optimization_barrier(xs) if is_late else xs
    xs = [lax.convert_element_type(x, FLOAT32) if x.dtype == low else x for x in xs]
    return lax.convert_element_type(_bound(eqn, xs, low, FLOAT32), out)


# On several devices XLA would undo the form that its 16-bit CPU kernels need, so no product uses
# these kernels.
_SPLIT = CPUKernels(False, False, "the program runs on several devices")


def _on_cpus(
    *operands: Any, jaxpr: ClosedJaxpr, kernels: CPUKernels = _SPLIT, **params: Any
) -> Any:
    """Contracts in the form of XLA:CPU's 16-bit kernels if they exist, otherwise in float32."""
    is_first = is_exchanged(body_of(jaxpr), contraction_of(jaxpr))
    options = {"exchanged": True} if is_first else {}

    def contract(eqn: JaxprEqn, xs: list[Any], low: np.dtype, out: np.dtype) -> Any:
        if low == FLOAT32:  # true in second derivatives of float8 products
            return _bound(eqn, xs, low, out)
        form = _CPU_FORMS.get(eqn.primitive.name) if kernels.wide else None
        dtype = low if out == low and kernels.rounded else FLOAT32
        result = form and form(*xs[:2], eqn.params, dtype, **options)
        if result is None:
            result = _widened(eqn, xs, low, out)
        return lax.convert_element_type(result, out)

    return _lowered(*operands, jaxpr=jaxpr, **params, contract=contract)


def _on_one_cpu(*operands: Any, low: np.dtype, **params: Any) -> Any:
    kernels = _SPLIT if low == np.float16 else cpu_kernels()
    return _on_cpus(*operands, low=low, kernels=kernels, **params)


# Functions that contract in the form of XLA:CPU's kernels. They return None if the equation has no
# such form.
_CPU_FORMS: dict[str, Callable[..., Any]] = {
    "dot_general": matmul,
    "conv_general_dilated": convolution,
}

accumulate_p: Any = registration.define_primitive(
    "accumulate", aval=contraction_aval, jvp=_jvp, transpose=_transpose, batch=_batch
)
registration.lowers_by_platform(accumulate_p, default=_lowered, cpu=_on_cpus, one_cpu=_on_one_cpu)
# `finalise` replaces the primitive by these functions. On CPUs the replacement widens bfloat16
# operands to float32, because XLA aborts at bfloat16 products without an optimization barrier, and
# the replacement has none.
_early = functools.partial(_lowered, contract=functools.partial(_widened, is_late=False))
registration.STAND_INS[accumulate_p] = {"default": _lowered, "cpu": _early}
holds_contraction(accumulate_p)
