"""Facts from the parameters of ordinary equations; no other module knows the parameters' names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from ...policies import FLOAT32
from ...policies.precisions import is_algorithm, precision_of
from ..compat import JaxprEqn, aval_of
from .held_contraction import contraction_in
from .traits import DERIVATIVES, having


def requested_precision(eqn: JaxprEqn) -> Any:
    """Returns an equation's ``precision`` if it is above the backend's default, else None.

    ``HIGH`` for one of the operands counts as above the default, and so does a dot algorithm, which
    names its dtypes.
    """
    precision: Any = eqn.params.get("precision")
    # A `DotAlgorithm` is a tuple, too.
    is_pair = isinstance(precision, tuple) and not isinstance(precision, lax.DotAlgorithm)
    words: tuple[Any, ...] = precision if is_pair else (precision,)
    return None if all(word in (None, lax.Precision.DEFAULT) for word in words) else precision


def without_request(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the changed parameters of a product that now runs in 16 bits."""
    # The program's `precision` is dropped, because it was chosen for float32 operands, and a dot
    # algorithm may refuse 16-bit operands.
    return {} if requested_precision(eqn) is None else {"precision": None}


def says_precision(eqn: JaxprEqn) -> bool:
    """Returns whether the program gives a product a precision."""
    return eqn.params.get("precision") is not None


_OF_FLOAT32 = (lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.F32_F32_F32)


def names_algorithm(eqn: JaxprEqn) -> bool:
    """Returns whether a float32 matmul names an algorithm other than full float32."""
    if eqn.primitive.name != "dot_general":
        return False
    algorithm = eqn.params["precision"]
    if not isinstance(algorithm, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return False
    dtypes = {*(aval_of(v).dtype for v in eqn.invars), preferred_dtype(eqn) or FLOAT32}
    return algorithm not in _OF_FLOAT32 and dtypes == {FLOAT32}


def with_precision(eqn: JaxprEqn, word: str) -> dict[str, Any] | None:
    """Returns the parameters that make a product of float32 operands run in a precision.

    Args:
        eqn: A contraction.
        word: One of `policies.precisions.PRECISIONS`.

    Returns:
        The parameters. None if the program itself gives the product a precision, or if ``word`` is
        a dot algorithm and the primitive is not a ``dot_general``.
    """
    asked = eqn.params.get("precision")
    if asked is not None and asked != (lax.Precision.DEFAULT, lax.Precision.DEFAULT):
        return None
    precision = precision_of(word)
    if not is_algorithm(word):
        return {"precision": (precision, precision)}
    return {"precision": precision} if eqn.primitive.name == "dot_general" else None


def preferred_dtype(eqn: JaxprEqn) -> np.dtype | None:
    """Returns the ``preferred_element_type`` of an equation; None if it has none."""
    preferred = eqn.params.get("preferred_element_type")
    return None if preferred is None else np.dtype(preferred)


def with_preferred_dtype(dtype: np.dtype) -> dict[str, Any]:
    """Returns the parameters that make a contraction return ``dtype``."""
    return {"preferred_element_type": dtype}


def cast_dtype(eqn: JaxprEqn) -> Any:
    """Returns the dtype that a ``convert_element_type`` casts to; None for another equation."""
    return eqn.params.get("new_dtype")


def casts_to_integer(eqn: JaxprEqn) -> bool:
    """Returns whether an equation casts floats to integers."""
    target = cast_dtype(eqn)
    if not isinstance(target, np.dtype) or target.kind not in "iu":
        return False
    return aval_of(eqn.invars[0]).dtype.kind not in "biu"


def adds_up_cotangents(eqn: JaxprEqn) -> bool:
    """Returns whether the transpose of an equation adds up many cotangents of one element.

    The derivative of a maximum adds up, too: it counts the elements that are equal to the maximum.

    Args:
        eqn: A ``broadcast_in_dim``, ``tile``, ``gather`` or ``all_gather``, or a maximum or minimum
            over an axis or over windows.
    """
    params = eqn.params
    operand, result = (aval_of(v).shape for v in (eqn.invars[0], eqn.outvars[0]))
    if "broadcast_dimensions" in params:
        kept = dict(zip(params["broadcast_dimensions"], operand, strict=True))
        return any(length != kept.get(k, 1) for k, length in enumerate(result))
    if not params.keys().isdisjoint(("reps", "axes", "all_gather_dimension")):
        return operand != result
    if "window_strides" in params:
        # One element is in 4 windows of 3 x 3 with stride 2, and in 9 with stride 1. A sum of so
        # few 16-bit terms loses no more than the rounding of the terms. For windows of 64 x 64, the
        # sum would stop at 256 times its first term.
        pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
        return math.prod(-(-length // stride) for length, stride in pairs) > 9
    # Indices are known only when the program runs, and may look up one row 8,192 times. But if
    # there is one index per batch element, as for a label's logit, each row is looked up once.
    batch = params["dimension_numbers"].start_indices_batching_dims
    lengths = aval_of(eqn.invars[1]).shape[:-1]
    is_single = all(length == 1 for d, length in enumerate(lengths) if d not in batch)
    return not (params["unique_indices"] or is_single)


def has_plain_update(eqn: JaxprEqn) -> bool:
    """Returns False for a scatter whose update is a function of the user: ``x.at[i].apply(fn)``."""
    update = eqn.params.get("update_jaxpr")
    return eqn.primitive.name != "scatter" or update is None or not update.eqns


_SCATTERS = having("redispatch")
_SCATTER_OPTIONS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def redispatched(eqn: JaxprEqn, *operands: Any) -> Any:
    """Emits a scatter for operands of another dtype.

    The update computation of the scatter is one of its parameters, a jaxpr of a fixed dtype. If the
    scatter were bound again with the same parameters, this jaxpr would get operands of a wrong
    dtype.
    """
    options = {name: eqn.params[name] for name in _SCATTER_OPTIONS}
    scatter: Any = getattr(lax, eqn.primitive.name.replace("-", "_"))
    return scatter(*operands, **options)


def dot_dimensions(eqn: JaxprEqn) -> Any:
    """Returns the contracting and batch dimensions of a matmul, each for both operands."""
    numbers = eqn.params.get("dimension_numbers")
    return numbers or eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers


def free_dimensions(eqn: JaxprEqn) -> tuple[int, int] | None:
    """Returns for both operands of a matmul how many dimensions are neither summed nor batch.

    Returns:
        Two numbers; None if the equation is not a matmul.
    """
    if eqn.primitive.name not in ("dot_general", "ragged_dot_general"):
        return None
    contracting, batch = dot_dimensions(eqn)
    left, right = (
        aval_of(v).ndim - len(c) - len(b)
        for v, c, b in zip(eqn.invars[:2], contracting, batch, strict=True)
    )
    return left, right


def multiplies_points(eqn: JaxprEqn, matrix: int) -> bool:
    """Returns whether a matmul applies a matrix to an array of points: `x, y` or `x, y, z`.

    The coordinates are the last axis of the array, and are not summed over.

    Args:
        eqn: The equation.
        matrix: The position of the operand that is the matrix, 0 or 1.
    """
    if eqn.primitive.name != "dot_general" or min(free_dimensions(eqn) or (0,)) < 1:
        return False
    shape, contracting = aval_of(eqn.invars[1 - matrix]).shape, dot_dimensions(eqn)[0]
    return shape[-1] in (2, 3) and len(shape) - 1 not in contracting[1 - matrix]


def is_norm(eqn: JaxprEqn) -> bool:
    """Returns whether a contraction is a sum of squares: `einsum("id,id->i", x, x)`.

    A matrix that is multiplied by itself is no such sum.
    """
    return eqn.invars[0] is eqn.invars[1] and free_dimensions(eqn) == (0, 0)


def reduction_depth(eqn: JaxprEqn) -> int:
    """Returns the number of products or elements that are summed into one element of a result.

    Args:
        eqn: An equation.

    Returns:
        The contracted size of a matmul; input features times window size of a convolution; the
        reduced or accumulated size of a reduction; 1 for any other equation.
    """
    # A primitive that autocast emits for a contraction counts as the contraction.
    eqn = contraction_in(eqn) or eqn
    # A value that is no array, such as a hijax variable of Flax, has no shape.
    shapes: list[tuple[int, ...]] = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    name, params = eqn.primitive.name, eqn.params
    if name in ("dot_general", "ragged_dot_general"):
        (contracting, _), _ = dot_dimensions(eqn)
        return math.prod(shapes[0][d] for d in contracting)
    if name == "conv_general_dilated":
        out_features = params["dimension_numbers"].rhs_spec[0]
        return math.prod(shapes[1]) // max(shapes[1][out_features], 1)
    if "axes" in params and name.startswith("reduce_"):
        return math.prod(shapes[0][d] for d in params["axes"])
    if name.startswith("cum"):
        return shapes[0][params["axis"]]
    return 1


def summands(eqn: JaxprEqn) -> int:
    """Returns the largest number of terms that are added up into one element of a result.

    It extends `reduction_depth` to windows and to scatters, whose updates may all hit one element.
    """
    if "window_dimensions" in eqn.params:
        return math.prod(eqn.params["window_dimensions"])
    if eqn.primitive.name in _SCATTERS:
        return math.prod(aval_of(eqn.invars[1]).shape[:-1])
    return reduction_depth(eqn)


def exponent(eqn: JaxprEqn) -> int | None:
    """Returns the exponent of an ``integer_pow``; None for another equation."""
    return eqn.params["y"] if eqn.primitive.name == "integer_pow" else None


def derivative_exponents(eqn: JaxprEqn) -> dict[int, float]:
    """Returns the exponent of each operand in the derivative by that operand; see `DERIVATIVES`."""
    n = exponent(eqn) or 1
    return {i: power(n) for i, power in DERIVATIVES.get(eqn.primitive.name, {}).items()}


def checkpoint_name_in(eqn: JaxprEqn) -> str:
    """Returns the ``jax.ad_checkpoint.checkpoint_name`` that an equation gives a value, or ""."""
    return str(eqn.params["name"]) if eqn.primitive.name == "name" else ""
