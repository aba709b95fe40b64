"""The primitive `float8_dot`: matrix products of two 8-bit arrays, and their derivatives.

XLA compiles a product of two float8 arrays, whose result is multiplied by a scalar, to one 8-bit
matmul of cuBLASLt. One `float8_dot` equation stands for both operations. The products of
derivatives also have 8-bit operands. A tangent or cotangent is quantized to the wider format. The
other factor was quantized in the forward pass, so that only 8 bits are kept for the backward pass.

With row scales, the result is multiplied by two vectors, one for each factor. For this, scales must
be constant along the contracted dimensions. In a backward product the scales of the kept factor
vary along these dimensions, so they multiply the cotangent before it is quantized. In this way one
8-bit copy of a weight or activation serves all three products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from ..interpreters.compat import ClosedJaxpr, with_dtype
from ..interpreters.compat.registration import (
    add_tangents,
    at_front,
    batch_size,
    define_primitive,
    is_undefined_primal,
    is_zero,
    lowers_by_platform,
    zero_tangent,
)
from ..interpreters.primitives.accumulate import tangent_contraction
from ..interpreters.primitives.held_contraction import (
    contraction_aval,
    contraction_of,
    holds_contraction,
)
from ..interpreters.primitives.reading import dot_dimensions
from ..policies import E4M3, FLOAT32, Float8
from .carriers import tangent_carrier
from .dimensions import batched, kept, met, transposed
from .scale import quantize, rows_of


class Factor(NamedTuple):
    """One factor of a product in 8 bits.

    Args:
        source: The array before quantization. Derivatives are taken with respect to it.
        values: The 8-bit values.
        inverse: The inverse scale: a scalar, or an array from `quantize` with length 1 along the
            contracted dimensions.
    """

    source: Any
    values: Any
    inverse: Any


def float8_dot(
    lhs: Factor,
    rhs: Factor,
    dimension_numbers: Any,
    *,
    recipe: Float8,
    weight: int | None,
    out: np.dtype,
    split: bool = False,
) -> Any:
    """Multiplies two arrays in 8 bits.

    Args:
        lhs: The left factor.
        rhs: The right factor.
        dimension_numbers: As for ``lax.dot_general``.
        recipe: The recipe for the products of derivatives.
        weight: The position of the weight, 0 or 1; None if neither factor is a weight.
        out: The dtype of the result.
        split: Whether partial sums are added in float32 instead of the narrower accumulator of the
            matrix units. Backward products do this, as in Transformer Engine and Flax.

    Returns:
        The product, of dtype ``out``. A gradient with respect to a factor's source has the dtype of
        the source; for a float32 weight it is the product's accumulator.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import Float8
        >>> from jmp_autocast.float8.scale import quantize
        >>> x, w = jnp.full((2, 4), 3.0), jnp.full((4, 2), 0.5)
        >>> def f(x, w):
        ...     x, w = (Factor(a, *quantize(a, jnp.dtype("float8_e4m3fn"))) for a in (x, w))
        ...     numbers = (((1,), (0,)), ((), ()))
        ...     options = {"recipe": Float8(), "weight": 1, "out": jnp.dtype("float32")}
        ...     return float8_dot(x, w, numbers, **options)
        >>> f(x, w).tolist(), jax.grad(lambda w: f(x, w).sum())(w)[0].tolist()
        ([[6.0, 6.0], [6.0, 6.0]], [6.0, 6.0])
    """
    avals = jax.typeof(lhs.values), jax.typeof(rhs.values)
    jaxpr = _dot_jaxpr(dimension_numbers, *avals)
    operands = (lhs.values, rhs.values, lhs.inverse, rhs.inverse, lhs.source, rhs.source)
    options = {"raw": None, "dtype": None, "rows": (), "split": split}
    return float8_dot_p.bind(
        *operands, jaxpr=jaxpr, recipe=recipe, weight=weight, out=np.dtype(out), **options
    )


# --- the primitive --------------------------------------------------------------------------
#
# float8_dot(lhs, rhs, inverse scales, sources; jaxpr, recipe, weight, out, split, raw, dtype, rows)
#
# The first two operands are the 8-bit values of both factors; their inverse scales and sources
# follow. If `raw` is not None, the factor at position `raw` is a tangent instead, without scale and
# source. The equation is linear in the tangent, and quantizes it to `dtype` with a scale for each
# index along `rows`. `jaxpr` holds the `dot_general` of the values.


def _factors(operands: Sequence[Any], raw: int | None) -> list[Factor]:
    if raw is None:
        return [Factor(operands[i + 4], operands[i], operands[i + 2]) for i in (0, 1)]
    values, inverse, source = operands[1 - raw], *operands[2:]
    factors = [Factor(source, values, inverse)]
    factors.insert(raw, Factor(operands[raw], None, None))
    return factors


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = float8_dot_p.bind(*primals, **params)
    factors = _factors(primals, params["raw"])
    terms = []
    # Derivatives are taken with respect to the operands at these positions: the sources of the
    # 8-bit factors, and the raw factor.
    for i, position in enumerate({None: (4, 5), 0: (0, 3), 1: (3, 1)}[params["raw"]]):
        if not is_zero(tangents[position]):
            terms.append(_by_tangent(i, tangents[position], factors[1 - i], **params))
    return out, functools.reduce(add_tangents, terms) if terms else zero_tangent(out)


def _by_tangent(
    i: int, tangent: Any, other: Factor, *, jaxpr: ClosedJaxpr, recipe: Float8, **params: Any
) -> Any:
    """Returns the product of factor ``i``'s tangent and the other factor."""
    is_weight = i == params["weight"]
    if is_weight and recipe.wgrad == "compute":
        numbers = contraction_numbers(jaxpr)
        pair = (tangent, other.source) if i == 0 else (other.source, tangent)
        low = other.source.dtype  # the dtype of the activation
        return tangent_contraction(*pair, numbers, low=low, out=params["out"])
    numbers, ranks = contraction_numbers(jaxpr), _ranks(jaxpr)
    if other.values is None:
        other = Factor(other.source, *quantize(other.source, params["dtype"], params["rows"]))
    operands = [other.values, other.inverse, tangent_carrier(other.source)]
    operands.insert(i, tangent)
    # If the other factor is e5m2, the tangent is e4m3. GPUs cannot multiply two e5m2 arrays: XLA
    # would convert both to float16.
    dtype = recipe.gradient_dtype if other.values.dtype == E4M3 else E4M3
    rows = rows_of(recipe.scaling, numbers, ranks[i], i)
    params |= {"raw": i, "dtype": dtype, "rows": rows, "split": True}
    return float8_dot_p.bind(*operands, jaxpr=jaxpr, recipe=recipe, **params)


def _transpose(
    cotangent: Any,
    *operands: Any,
    jaxpr: ClosedJaxpr,
    recipe: Float8,
    weight: int | None,
    raw: int,
    **params: Any,
) -> list[Any]:
    operand = operands[raw]
    result: list[Any] = [None] * len(operands)
    if is_zero(cotangent) or not is_undefined_primal(operand):
        return result
    other = _factors(operands, raw)[1 - raw]
    dtype = recipe.gradient_dtype if other.values.dtype == E4M3 else E4M3
    numbers, order = transposed(contraction_numbers(jaxpr), _ranks(jaxpr), raw)
    ranks = [other.values.ndim] * 2
    ranks[raw] = cotangent.ndim
    cotangent, other = _without_summed_scales(cotangent, other, numbers, ranks, raw)
    factors = [other, other]
    rows = rows_of(recipe.scaling, numbers, ranks[raw], raw)
    factors[raw] = Factor(cotangent, *quantize(cotangent, dtype, rows))
    product = float8_dot(
        factors[0],
        factors[1],
        numbers,
        recipe=recipe,
        weight=None if weight == raw else weight,
        out=operand.aval.dtype,
        split=True,
    )
    result[raw] = product if order == tuple(range(len(order))) else lax.transpose(product, order)
    return result


def _without_summed_scales(
    cotangent: Any, other: Factor, numbers: Any, ranks: Sequence[int], raw: int
) -> tuple[Any, Factor]:
    """Returns the cotangent and the factor, with the factor's scales moved to the cotangent.

    Scales that vary along contracted dimensions multiply the cotangent and divide the factor's
    source, both exactly, because they are powers of two.
    """
    inverse = other.inverse
    if not inverse.ndim or all(inverse.shape[d] == 1 for d in numbers[0][1 - raw]):
        return cotangent, other
    # The product is float32, because a scale may be beyond the range of float16.
    wide = lax.convert_element_type(cotangent, FLOAT32)
    scaled = wide * met(inverse, numbers, ranks, 1 - raw)
    source = lax.convert_element_type(other.source, FLOAT32) / inverse
    return scaled, Factor(source, other.values, lax.full((), 1.0, FLOAT32))


def _batch(
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    raw: int | None,
    rows: tuple[int, ...],
    **params: Any,
) -> tuple[Any, int]:
    size = batch_size(operands, dims)
    pairs = zip(_factors(operands, raw), _factors(dims, raw), strict=True)
    ranks = _ranks(jaxpr)
    mapped = [_mapped(*pair, rank, size) for pair, rank in zip(pairs, ranks, strict=True)]
    factors, is_mapped = zip(*mapped, strict=True)
    numbers, at = batched(contraction_numbers(jaxpr), ranks, is_mapped)
    if raw is not None and is_mapped[raw]:
        rows = (0, *(d + 1 for d in rows))
    values = [f.source if i == raw else f.values for i, f in enumerate(factors)]
    rest = [f for i, f in enumerate(factors) if i != raw]
    arrays = [*values, *(f.inverse for f in rest), *(f.source for f in rest)]
    avals = [jax.typeof(x) for x in values]
    if raw is not None:
        avals[raw] = with_dtype(avals[raw], params["dtype"])
    params |= {"jaxpr": _dot_jaxpr(numbers, *avals), "raw": raw, "rows": rows}
    return float8_dot_p.bind(*arrays, **params), at


def _mapped(factor: Factor, dims: Factor, rank: int, size: int) -> tuple[Factor, bool]:
    """Returns a factor with its `vmap` dimension moved to the front, and whether `vmap` maps it."""
    if all(d is None for d in dims):
        return factor, False
    source = at_front(factor.source, dims.source, size)
    if factor.values is None:
        return Factor(source, None, None), True
    inverse = at_front(factor.inverse, dims.inverse, size)
    if inverse.ndim == 1:  # one scale for each example
        inverse = inverse.reshape(size, *(1,) * rank)
    return Factor(source, at_front(factor.values, dims.values, size), inverse), True


def contraction_numbers(jaxpr: ClosedJaxpr) -> Any:
    """Returns the dimension numbers of the one ``dot_general`` of a jaxpr."""
    return dot_dimensions(contraction_of(jaxpr))


def _ranks(jaxpr: ClosedJaxpr) -> list[int]:
    return [v.aval.ndim for v in contraction_of(jaxpr).invars]


def _dot_jaxpr(dimension_numbers: Any, *avals: Any) -> Any:
    numbers = tuple(tuple(tuple(map(int, d)) for d in pair) for pair in dimension_numbers)
    return _traced(numbers, avals, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=4096)
def _traced(dimension_numbers: Any, avals: tuple[Any, ...], mesh: Any) -> Any:
    dot = functools.partial(
        lax.dot_general, dimension_numbers=dimension_numbers, preferred_element_type=FLOAT32
    )
    return jax.make_jaxpr(dot)(*avals)


def _lowered(
    *operands: Any,
    widen: bool,
    jaxpr: ClosedJaxpr,
    recipe: Float8,
    out: np.dtype,
    split: bool,
    raw: int | None,
    dtype: np.dtype | None,
    rows: tuple[int, ...],
    **_: Any,
) -> Any:
    """Multiplies the values, in float32 if ``widen``, and then the result by the inverse scales."""
    numbers = contraction_numbers(jaxpr)
    factors = _factors(operands, raw)
    if raw is not None:
        assert dtype is not None
        factors[raw] = Factor(None, *quantize(factors[raw].source, dtype, rows))
    values = [f.values for f in factors]
    ranks = [v.ndim for v in values]
    if recipe.emulate:
        # The barrier keeps XLA for GPUs from removing a cast to 8 bits before a cast back.
        values = lax.optimization_barrier(values)
    if widen:
        values = [lax.convert_element_type(v, FLOAT32) for v in values]
    # For a float16 result the product is float32, because 448 * 448 * K is beyond float16. For a
    # bfloat16 result the product is bfloat16: the scale, a power of two, rounds nothing, and
    # cuBLASLt writes 16 bits. With a float32 product XLA runs one more kernel, and the temporaries
    # grew from 5.2 to 8.4 MB.
    wide = FLOAT32 if widen or out == np.float16 else out
    product = lax.dot_general(
        values[0],
        values[1],
        numbers,
        precision=lax.Precision.HIGHEST if split else None,
        preferred_element_type=wide,
    )
    scales = [kept(f.inverse, numbers, ranks, i) for i, f in enumerate(factors)]
    scale = lax.convert_element_type(scales[0] * scales[1], wide)
    return lax.convert_element_type(product * scale, out)


float8_dot_p: Any = define_primitive(
    "float8_dot", aval=contraction_aval, jvp=_jvp, transpose=_transpose, batch=_batch
)
# On CPUs the product is float32: for 16-bit results, XLA:CPU lacks products of 8-bit operands in
# some layouts.
lowers_by_platform(
    float8_dot_p,
    default=functools.partial(_lowered, widen=False),
    cpu=functools.partial(_lowered, widen=True),
)
holds_contraction(float8_dot_p)
